"""Equal numbers of devices: one with weights and the others as memory, against replicas, in virtual time.

Three tables. The first has decode steps by the cost model: tokens per second and milliseconds per token of B
requests of one context length. They are on replicas, or on one instance and its memory instances, whole or
in two micro-batches. Where B requests have no room, as many as have it run. The second compares the balance
of attention over memory instances by sequence, by request and by KV head, for equal and for unequal lengths.
The third has whole runs of the policies, prompts included, by requests that all arrive at once. Needs no
device.

    python benchmarks/evaluation/memory_instances.py                                        # a minute
    python benchmarks/evaluation/memory_instances.py --model qwen3-30b-a3b --device h100    # large weights
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.core.cost.work import InstanceWork, StepWork, WorkCount
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import striped
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware, SimulatedCluster
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table

BATCHES = (64, 128, 256, 512)
CONTEXTS = (4_096, 16_384, 65_536)
AT_ONCE = 1e6  # requests per second
UNEQUAL = (1_000_000, *[4_000] * 63)
EQUAL = (20_000,) * 64


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decode steps of `batch` requests on devices in a layout: those that run, tokens/s and s a token."""

    num_devices: int
    layout: str
    batch: int
    context: int
    num_running: int
    tokens_per_second: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run of a policy: requests/s with their prompts, s a token, tokens of KV served and moved."""

    num_devices: int
    policy: str
    workload: str
    num_requests: int
    request_rate: float
    tpot: float
    num_served_tokens: int | None
    num_pushed_tokens: int | None
    num_migrated_tokens: int | None


def hardware(args: argparse.Namespace, num_full: int, num_memory: int) -> Hardware:
    """Return instances of the model on the devices."""
    memory_device = args.memory_device if num_memory else None
    return Hardware(
        shape_of(find_config(args.model, "dummy")),
        args.device,
        num_full,
        memory_instances=num_memory,
        memory_device=memory_device,
    )


def step_of(lengths: Sequence[int], memory_ids: Sequence[int], num_micro_batches: int = 1) -> StepWork:
    """Return a step of decodes on instance 0, whose KV is there or spread over memory instances."""
    count = WorkCount((0,), is_lease=True)
    for length in lengths:
        count.add_decode(0, striped("", range(length), tuple(memory_ids or (0,))))
    return replace(count.step(ESPGroup((0,)), is_first=False), num_micro_batches=num_micro_batches)


def decoded(args: argparse.Namespace, num_devices: int) -> Iterator[Decoded]:
    """Yield all layouts of a number of devices."""
    replicas = hardware(args, num_devices, 0).cluster("replicas")
    offloaded = hardware(args, 1, num_devices - 1).cluster("lamina")
    memory = [i for i in offloaded.instances if i.kind is InstanceKind.ATTENTION]
    for context in CONTEXTS:
        for batch in BATCHES:
            pool = replicas.instances[0].kv_capacity
            each = min(batch // num_devices, pool // context)
            if each:
                seconds = replicas.cost_model.step_time(step_of([context] * each, ()))
                yield _decoded(num_devices, "replicas", batch, context, each * num_devices, seconds)
            running = min(batch, sum(i.kv_capacity for i in memory) // context)
            for number in (1, 2):
                step = step_of([context] * running, [i.instance_id for i in memory], number)
                name = "1 + memory" + (", 2 micro-batches" if number > 1 else "")
                seconds = offloaded.cost_model.step_time(step)
                yield _decoded(num_devices, name, batch, context, running, seconds)


def _decoded(
    num_devices: int, layout: str, batch: int, context: int, num_running: int, seconds: float
) -> Decoded:
    return Decoded(num_devices, layout, batch, context, num_running, num_running / seconds, seconds)


def balances(cluster: SimulatedCluster) -> Iterator[tuple[str, str, float]]:
    """Yield a distribution of lengths, a balance, and the seconds of a step."""
    ids = [i.instance_id for i in cluster.instances if i.kind is InstanceKind.ATTENTION]
    for name, lengths in (("64 of 20k", EQUAL), ("1M and 63 of 4k", UNEQUAL)):
        whole = step_of(lengths, ids)
        yield name, "by sequence", cluster.cost_model.step_time(whole)
        keys = dict.fromkeys(ids, 0)
        for length in sorted(lengths, reverse=True):
            keys[min(keys, key=lambda i: keys[i])] += length
        num_queries = len(lengths)
        by_request = {i: replaced(whole.holders[i], num_keys, num_queries) for i, num_keys in keys.items()}
        by_head = {i: replaced(work, work.num_decode_keys, num_queries) for i, work in whole.holders.items()}
        member = whole.instances[0].copy()
        member.num_sent_queries = num_queries  # each goes to one holder, or in parts to all
        for balance, holders in (("by request", by_request), ("by KV head", by_head)):
            step = replace(whole, instances={0: member}, holders=holders)
            yield name, balance, cluster.cost_model.step_time(step)


def replaced(work: InstanceWork, num_keys: int, num_queries: int) -> InstanceWork:
    """Return the work of a holder that reads other keys, for its share of these queries."""
    other = work.copy()
    other.num_decode_keys, other.num_sent_queries = num_keys, num_queries
    return other


def runs(args: argparse.Namespace) -> Iterator[Run]:
    """Yield whole runs."""
    for num_devices in (2, 4):
        for workload in ("fixed(4096,256)", "fixed(16384,1024)"):
            for policy, num_full in (("replicas", num_devices), ("lamina", 1)):
                yield whole_run(args, policy, workload, num_full, num_devices - num_full)


def whole_run(args: argparse.Namespace, policy: str, workload: str, num_full: int, num_memory: int) -> Run:
    """Simulate a policy, with requests that all arrive at once."""
    cell = Cell(workload, "tight", policy, 0, args.model, args.device, num_full, 1, args.num_requests, 0.1)
    config = replace(cell.config(), is_per_class=False, hardware=hardware(args, num_full, num_memory))
    config = replace(config, policy=replace(config.policy, max_micro_batches=args.max_micro_batches))
    point = run_point(config, asked_of(config, policy, config.rules[0], AT_ONCE))
    counters, latency = point.counters, point.metrics.latencies.tpot
    tpot = 0.0 if latency is None else latency["mean"]
    return Run(
        num_full + num_memory,
        policy,
        workload,
        point.metrics.num_completed,
        point.metrics.request_throughput,
        tpot,
        counters.num_served_tokens,
        counters.num_pushed_tokens,
        counters.num_migrated_tokens,
    )


def main() -> None:
    parser = script_parser("memory_instances", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    parser.add_argument("--memory-device", help="device of memory instances (the same)")
    parser.add_argument("--num-requests", type=int, default=128, help="of each whole run (%(default)s)")
    parser.add_argument("--max-micro-batches", type=int, help="of whole runs (1 on GPUs)")
    args = parser.parse_args()
    steps = [step for num_devices in (2, 3, 4) for step in decoded(args, num_devices)]
    print(
        table(
            ("devices", "layout", "context", "batch", "running", "tokens/s", "ms a token"),
            [
                (
                    str(s.num_devices),
                    s.layout,
                    f"{s.context:,}",
                    str(s.batch),
                    str(s.num_running),
                    f"{s.tokens_per_second:,.0f}",
                    f"{1e3 * s.tpot:.1f}",
                )
                for s in steps
            ],
        )
    )
    balanced = list(balances(hardware(args, 1, 3).cluster("lamina")))
    print(table(("lengths", "balance", "ms a step"), [(n, b, f"{1e3 * s:.1f}") for n, b, s in balanced]))
    found = list(runs(args))
    print(
        table(
            ("devices", "policy", "requests", "requests/s", "ms a token", "served", "pushed", "moved"),
            [
                (
                    str(r.num_devices),
                    r.policy,
                    f"{r.num_requests} {r.workload}",
                    f"{r.request_rate:.2f}",
                    f"{1e3 * r.tpot:.1f}",
                    *(
                        f"{n or 0:,}"
                        for n in (r.num_served_tokens, r.num_pushed_tokens, r.num_migrated_tokens)
                    ),
                )
                for r in found
            ],
        )
    )
    numbers = {
        "command": shlex.join(["python", *sys.argv]),
        "steps": [asdict(step) for step in steps],
        "balance": balanced,
        "runs": [asdict(run) for run in found],
    }
    print_result("memory_instances", numbers, save=args.save)


if __name__ == "__main__":
    main()
