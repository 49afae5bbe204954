"""KV of decodes under `esp` on memory instances, by price, against keeping it, in virtual time.

Each run has requests that all arrive at once, on two instances with two memory instances: with pools of all
memory, or so short that few requests fit. They have one length, or lengths drawn with each seed.
`esp-no-memory` leaves memory instances idle, and `lamina` pushes all KV of prompts there. Printed are output
tokens a second, milliseconds a token and seconds to a first token. So are KV tokens that moved, that prompts
pushed, and that decodes read elsewhere in each step of theirs. Needs no device.

    python benchmarks/evaluation/memory_price.py    # some minutes
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table

POLICIES = ("esp", "esp-no-memory", "lamina")
NUM_REQUESTS = {
    "fixed(500,300)": 256,
    "fixed(4000,500)": 128,
    "fixed(16000,500)": 48,
    "fixed(60000,500)": 24,
    "zipf(1.0,500,30000,400)": 64,
    "zipf(1.0,500,60000,400)": 48,
}
WORKLOADS = tuple(NUM_REQUESTS)
SHORT = {  # slots of a pool; others: 150,000
    "fixed(500,300)": 40_000,
    "fixed(4000,500)": 100_000,
    "zipf(1.0,500,30000,400)": 100_000,
}
AT_ONCE = 1e6  # requests per second


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run: output tokens/s, s a token, s to a first token, and tokens of KV."""

    workload: str
    pools: str
    memory_device: str
    policy: str
    seed: int
    num_completed: int
    tokens_per_second: float
    tpot: float
    ttft: float
    num_migrated_tokens: int
    num_pushed_tokens: int
    num_served_tokens: int
    num_preemptions: int


def run_of(
    args: argparse.Namespace, workload: str, pools: str, memory_device: str, policy: str, seed: int
) -> Run:
    """Simulate a policy."""
    number = NUM_REQUESTS[workload]
    cell = Cell(workload, args.slo, policy, seed, args.model, args.device, args.num_instances, 1, number, 0.1)
    hardware = Hardware(
        shape_of(find_config(args.model, "dummy")),
        args.device,
        args.num_instances,
        kv_cache_tokens=SHORT.get(workload, 150_000) if pools == "short" else None,
        memory_instances=args.memory_instances,
        memory_device=memory_device,
    )
    config = replace(cell.config(), is_per_class=False, hardware=hardware)
    point = run_point(config, asked_of(config, policy, config.rules[0], AT_ONCE))
    counters, latencies = point.counters, point.metrics.latencies
    return Run(
        workload,
        pools,
        memory_device,
        policy,
        seed,
        point.metrics.num_completed,
        point.metrics.output_throughput,
        0.0 if latencies.tpot is None else latencies.tpot["mean"],
        0.0 if latencies.ttft is None else latencies.ttft["mean"],
        counters.num_migrated_tokens or 0,
        counters.num_pushed_tokens or 0,
        counters.num_served_tokens or 0,
        counters.num_preemptions or 0,
    )


def runs(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs."""
    for memory_device, workload, pools in product(args.memory_device, args.workload, ("whole", "short")):
        for seed, policy in product(args.seed if _is_drawn(workload) else [0], args.policy):
            yield run_of(args, workload, pools, memory_device, policy, seed)


def _is_drawn(workload: str) -> bool:
    """Return whether lengths differ with the seed."""
    return not workload.startswith("fixed")


def main() -> None:
    parser = script_parser("memory_price", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    parser.add_argument(
        "--memory-device", nargs="+", default=["h200"], help="of memory instances (%(default)s)"
    )
    parser.add_argument("--num-instances", type=int, default=2, help="with weights (%(default)s)")
    parser.add_argument("--memory-instances", type=int, default=2, help="without (%(default)s)")
    parser.add_argument("--workload", nargs="+", default=WORKLOADS, choices=WORKLOADS, help="to run (all)")
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="to run (%(default)s)")
    parser.add_argument("--slo", default="tight", help="rule of all requests (%(default)s)")
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2], help="of drawn lengths (0 1 2)")
    args = parser.parse_args()
    found = []
    for run in runs(args):
        print(run, file=sys.stderr)
        found.append(run)
    print(
        table(
            (
                "memory",
                "requests",
                "pools",
                "seed",
                "policy",
                "tokens/s",
                "ms a token",
                "first",
                "moved",
                "pushed",
                "served",
            ),
            [
                (
                    run.memory_device,
                    f"{run.num_completed} {run.workload}",
                    run.pools,
                    f"{run.seed}",
                    run.policy,
                    f"{run.tokens_per_second:,.0f}",
                    f"{1e3 * run.tpot:.1f}",
                    f"{run.ttft:.2f}",
                    f"{run.num_migrated_tokens:,}",
                    f"{run.num_pushed_tokens:,}",
                    f"{run.num_served_tokens:,}",
                )
                for run in found
            ],
        )
    )
    numbers = {"command": shlex.join(["python", *sys.argv]), "runs": [asdict(run) for run in found]}
    print_result("memory_price", numbers, save=args.save)


if __name__ == "__main__":
    main()
