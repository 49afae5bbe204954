"""Layers with a window that keep few tokens, and the same memory with as many tokens in all layers.

A model with windows is simulated where KV has little room. Its instances have KV of as many tokens in layers
with a window as in others (-), or of N. Long prompts, and sessions of agents whose beginnings are cached,
gain from the room of the other layers. Short chats lose, since little of them leaves its window. Each load
comes all at once, for throughput, and at a rate, for attainment. Needs no device.

    python benchmarks/evaluation/window_memory.py                                       # some minutes
    python benchmarks/evaluation/window_memory.py --num-instances 2 --window-kv-tokens 20480
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.window_memory import WindowMemory
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.config import PolicyConfig
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table

AT_ONCE = 1e6  # requests per second
LOADS = {  # requests, and their rate on one instance
    "uniform(4000,12000,400)": (48, 0.3),
    "agents": (60, 0.6),
    "sharegpt": (200, 4.0),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run with KV of `window_kv_tokens` in layers with a window (None: as in others); seconds."""

    workload: str
    window_kv_tokens: int | None
    kv_cache_tokens: int  # an instance
    rate: float
    num_completed: int
    requests_per_second: float
    attainment: float
    ttft: float  # mean
    tpot: float  # mean
    hit_rate: float | None
    num_window_dropped_tokens: int
    num_preemptions: int


def hardware_of(args: argparse.Namespace, window_kv_tokens: int | None) -> Hardware:
    """Return instances whose layers with a window have so much room."""
    shape = shape_of(find_config(args.model, "dummy"))
    windows = None
    if window_kv_tokens is not None:
        num_batched_tokens = args.num_instances * args.max_num_batched_tokens
        windows = WindowMemory.of(shape.window, window_kv_tokens, num_batched_tokens)
    return Hardware(shape, args.device, args.num_instances, windows=windows)


def run_of(args: argparse.Namespace, workload: str, window_kv_tokens: int | None, rate: float) -> Run:
    """Simulate a load."""
    hardware = hardware_of(args, window_kv_tokens)
    config = SimulateConfig(
        model=args.model,
        policies=("esp",),
        rules=(parse_slo(args.slo, workload=workload),),
        rates=(rate,),
        hardware=hardware,
        load=SimulatedLoadConfig(workload, args.seed, num_requests=LOADS[workload][0] * args.num_instances),
        policy=PolicyConfig(max_num_batched_tokens=args.max_num_batched_tokens),
    )
    point = run_point(config, asked_of(config, "esp", config.rules[0], rate))
    metrics, counters = point.metrics, point.counters
    ttft, tpot = metrics.latencies.ttft, metrics.latencies.tpot
    assert ttft is not None, "none has completed"
    assert tpot is not None, "none has completed"
    return Run(
        workload,
        window_kv_tokens,
        hardware.cluster("esp").instances[0].kv_capacity,
        rate,
        metrics.num_completed,
        metrics.num_completed / metrics.duration,
        metrics.attainment or 0.0,
        ttft["mean"],
        tpot["mean"],
        metrics.hit_rate,
        counters.num_window_dropped_tokens or 0,
        counters.num_preemptions or 0,
    )


def runs(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs."""
    for workload in args.workload:
        for rate in (AT_ONCE, LOADS[workload][1] * args.num_instances):
            for window_kv_tokens in (None, *args.window_kv_tokens):
                yield run_of(args, workload, window_kv_tokens, rate)


def row(run: Run) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        f"{run.num_completed} {run.workload}",
        "at once" if run.rate == AT_ONCE else f"{run.rate:g}",
        "-" if run.window_kv_tokens is None else f"{run.window_kv_tokens:,}",
        f"{run.kv_cache_tokens:,}",
        f"{run.requests_per_second:.3f}",
        f"{run.attainment:.1%}",
        f"{run.ttft:.2f}",
        f"{1e3 * run.tpot:.1f}",
        "-" if run.hit_rate is None else f"{run.hit_rate:.1%}",
        f"{run.num_window_dropped_tokens:,}",
        f"{run.num_preemptions}",
    )


HEAD = (
    *("requests", "req/s sent", "window KV", "other KV", "req/s", "in time", "TTFT s", "ms a token", "hits"),
    *("dropped", "preempted"),
)


def main() -> None:
    parser = script_parser("window_memory", __doc__)
    parser.add_argument("--model", default="gemma-3-27b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h100", help="device to simulate (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=1, help="number of instances (%(default)s)")
    parser.add_argument("--window-kv-tokens", nargs="+", type=int, default=[16384, 20480, 24576], metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of a step (%(default)s)")
    parser.add_argument("--workload", nargs="+", default=list(LOADS), choices=LOADS, help="to run (all)")
    parser.add_argument("--slo", default="tight", help="rule of all requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    found = []
    for run in runs(args):
        print(" ".join(row(run)), file=sys.stderr, flush=True)
        found.append(run)
    print(table(HEAD, [row(run) for run in found]))
    numbers = {
        "command": shlex.join(["python", *sys.argv]),
        "model": args.model,
        "device": args.device,
        "num_instances": args.num_instances,
        "runs": [asdict(run) for run in found],
    }
    print_result("window_memory", numbers, save=args.save)


if __name__ == "__main__":
    main()
