"""The worth of copies of hot prefixes, in virtual time: `esp`, and `esp-no-copies`, on one load.

Ten users have a system prompt each (`shared-prefix`), and their requests come at random. With copies a
prefix goes to the instances where its readers wait least. Reports the time to the first token, output, the
tokens that were copied, and those that were computed. Needs no device.

    python benchmarks/evaluation/prefix_copies.py
"""

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table

POLICIES = "esp", "esp-no-copies"


@dataclass(frozen=True, slots=True)
class Found:
    """A policy on a load. Times are in seconds."""

    workload: str
    policy: str
    request_rate: float
    mean_ttft: float
    p99_ttft: float
    request_throughput: float
    num_copied_tokens: int
    share_cached: float


def run(args: argparse.Namespace, workload: str, rate: float, policy: str) -> Found:
    """Simulate a policy on a load."""
    where = args.model, args.device, args.num_instances, 1
    cell = Cell(workload, "tight", policy, args.seed, *where, args.num_requests, 0.1)
    config = replace(cell.config(), is_per_class=False)
    point = run_point(config, asked_of(config, policy, config.rules[0], rate))
    metrics, counters = point.metrics, point.counters
    ttft = metrics.latencies.ttft
    assert ttft is not None, "some request completed"
    return Found(
        workload,
        policy,
        rate,
        ttft["mean"],
        ttft["p99"],
        metrics.request_throughput,
        counters.num_copied_tokens or 0,
        (metrics.num_cached_tokens or 0) / metrics.num_input_tokens,
    )


def rows(found: list[Found]) -> list[tuple[str, ...]]:
    return [
        (
            each.workload,
            f"{each.request_rate:g}",
            each.policy,
            f"{1e3 * each.mean_ttft:.0f}",
            f"{1e3 * each.p99_ttft:.0f}",
            f"{each.request_throughput:.3g}",
            f"{each.num_copied_tokens:,}",
            f"{100 * each.share_cached:.1f}",
        )
        for each in found
    ]


def main() -> None:
    parser = script_parser("prefix_copies", __doc__)
    parser.add_argument("--workload", nargs="+", default=["shared-prefix(2048)"], help="loads (%(default)s)")
    parser.add_argument("--rate", nargs="+", type=float, default=[50, 100], help="rates (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=300, help="requests of a run (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=4, help="instances (%(default)s)")
    parser.add_argument("--model", default="llama-3.1-8b", help="model (%(default)s)")
    parser.add_argument("--device", default="h200", help="device (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the load (%(default)s)")
    args = parser.parse_args()
    found = [
        run(args, workload, rate, policy)
        for workload in args.workload
        for rate in args.rate
        for policy in POLICIES
    ]
    titles = "workload", "req/s", "policy", "TTFT mean ms", "p99 ms", "done/s", "copied tokens", "cached %"
    print(table(titles, rows(found)))
    command = shlex.join(["python", "benchmarks/evaluation/prefix_copies.py", *sys.argv[1:]])
    print_result(
        "prefix_copies",
        {"command": command, "runs": [asdict(each) for each in found]},
        save=args.save,
    )


if __name__ == "__main__":
    main()
