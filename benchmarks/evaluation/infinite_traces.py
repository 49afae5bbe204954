"""Throughput on the nine traces of Infinite-LLM, in virtual time on A800s, for Llama-2-7B.

All requests of a trace arrive at once, and a policy's throughput is their number over the time until the last
one has ended. `infinite` lends memory between instances, `vllm-m` is the same without that, and `vllm-s` is
one instance of all GPUs. A policy that refuses a request as too long has none. The paper (arXiv 2401.02669)
reports 1.35 to 1.73 times the throughput of `vllm-m` on traces 0 to 2. On the others it reports 1.4 to 3.4
times that of `vllm-s`. Needs no device.

    python benchmarks/evaluation/infinite_traces.py                                     # an hour
    python benchmarks/evaluation/infinite_traces.py --workload infinite-1 infinite-3    # minutes
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.processes.gc_tuning import tune_gc
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table

WORKLOADS = tuple(f"infinite-{number}" for number in range(9))
POLICIES = ("infinite", "vllm-m", "vllm-s", "esp")
NUM_REQUESTS = {**dict.fromkeys(WORKLOADS[:3], 1_000), **dict.fromkeys(WORKLOADS[3:], 60)}
NUM_INSTANCES = {**dict.fromkeys(WORKLOADS[:7], 8), "infinite-7": 16, "infinite-8": 32}  # for the longest
AT_ONCE = 1e6  # requests per second


def throughput(workload: str, policy: str, args: argparse.Namespace) -> float | None:
    """Return the requests that a policy completes per second; None if it refuses some."""
    num_instances = args.num_instances or NUM_INSTANCES[workload]
    num_requests = args.num_requests or NUM_REQUESTS[workload]
    cell = Cell(
        workload, "tight", policy, args.seed, args.model, args.device, num_instances, 1, num_requests, 0.1
    )
    config = replace(cell.config(), is_per_class=False)
    metrics = run_point(config, asked_of(config, policy, config.rules[0], AT_ONCE)).metrics
    return metrics.request_throughput if metrics.num_completed == num_requests else None


def rows(found: Sequence[tuple[str, str, float | None]]) -> list[tuple[str, ...]]:
    """Return a row for each workload: requests per second of each policy."""
    by_workload: dict[str, list[float | None]] = {}
    for workload, _, rate in found:
        by_workload.setdefault(workload, []).append(rate)
    return [
        (workload, *("-" if rate is None else f"{rate:.3g}" for rate in rates))
        for workload, rates in by_workload.items()
    ]


def main() -> None:
    parser = script_parser("infinite_traces", __doc__)
    parser.add_argument("--policy", nargs="+", default=POLICIES, help=f"({' '.join(POLICIES)})")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="(all nine)")
    parser.add_argument("--model", default="llama-2-7b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="a800", help="device to simulate (%(default)s)")
    parser.add_argument(
        "--num-instances", type=int, help="number of instances (8; 16 for infinite-7, then 32)"
    )
    parser.add_argument("--num-requests", type=int, help="of each trace (1,000 of 0 to 2, 60 of the others)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    tune_gc()
    found = []
    for workload in args.workload:
        for policy in args.policy:
            found.append((workload, policy, throughput(workload, policy, args)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(table(("requests/s", *args.policy), rows(found)))
    command = shlex.join(["python", *sys.argv])
    print_result("infinite_traces", {"command": command, "throughputs": found}, save=args.save)


if __name__ == "__main__":
    main()
