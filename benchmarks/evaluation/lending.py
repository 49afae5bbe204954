"""Engines that lend each other room by the protocol of managers, in virtual time.

Eight engines of one A800 each, Llama-2-7B with small pools, so that memory is short. All requests come in a
few seconds. Rows: no lending; loans when an instance is full (DistKV-LLM), by period of heartbeats; the same
without swaps of debts (DGFM); with lost messages; with the gManager killed; and Infinite-LLM's Algorithm 1.
Refused are the moves that a destination had no room for. Remote are the blocks that leases read on other
instances. Failover is the time until a new gManager knows everything. Needs no device.

    python benchmarks/evaluation/lending.py            # minutes
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cost.cost_model import CostModel
from loong.hardware.machine import num_processors
from loong.hardware.model_shape import shape_of
from loong.lending.global_manager import Planning
from loong.lending.greedy import Thresholds
from loong.model.shapes import find_config
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.infinite.paper import StepModel
from loong.scheduler.tuning import CREDITOR_MEMORY_SHARE, LEAST_SWAP
from loong.simulation.cluster import Hardware
from loong.simulation.lending import LendingConfig, LendingCounts, LendingRun
from loong.simulation.parallel import in_order
from loong.workloads.report.report import table
from loong.workloads.workload import endless_workload

PERIODS = (0.01, 0.1, 1.0, 10.0)
SWAPPING = Planning(least_swap=LEAST_SWAP)


@dataclass(frozen=True, slots=True)
class Found:
    """A row: the name of a configuration, a seed, and the counts of its run."""

    name: str
    seed: int
    tokens_per_second: float
    counts: LendingCounts


def configs(args: argparse.Namespace, cost_model: CostModel) -> dict[str, LendingConfig]:
    """Return the configurations by name."""
    base = LendingConfig(args.num_engines, args.pool, planning=SWAPPING)
    model = StepModel(cost_model)
    thresholds = Thresholds(model.debtor_batch, CREDITOR_MEMORY_SHARE)
    algorithm_1 = Planning(model, thresholds, joining_blocks=args.joining_blocks)
    return {
        "no lending": replace(base, planning=Planning(), can_borrow=False),
        **{f"loans, heartbeat {period:g} s": replace(base, heartbeat=period) for period in PERIODS},
        "without swaps": replace(base, planning=Planning()),
        "5 % of messages lost": replace(base, loss=0.05),
        "gManager killed": replace(base, killed_at=args.killed_at),
        "Algorithm 1": replace(base, planning=algorithm_1, can_borrow=False),
        "Algorithm 1, heartbeat 1 s": replace(base, planning=algorithm_1, can_borrow=False, heartbeat=1.0),
    }


def run(args: argparse.Namespace, asked: tuple[str, int]) -> Found:
    """Simulate a configuration with the requests of a seed."""
    name, seed = asked
    shape = shape_of(find_config(args.model, "dummy"))
    cost_model = Hardware(shape, args.device, num_instances=args.num_engines).cluster("infinite").cost_model
    config = replace(configs(args, cost_model)[name], seed=seed)
    requests = endless_workload(args.workload, seed=seed, request_rate=args.rate)
    counts = LendingRun(config, cost_model).run(islice(requests, args.num_requests))
    return Found(name, seed, counts.tokens_per_second, counts)


def rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return a row for each configuration, with the means over seeds."""
    by_name: dict[str, list[Found]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    return [(name, *_means(some)) for name, some in by_name.items()]


def _means(some: Sequence[Found]) -> tuple[str, ...]:
    counts = [each.counts for each in some]
    num_asked = sum(c.num_allowed + c.num_refused for c in counts)
    num_read = sum(c.num_read_blocks for c in counts)
    failovers = [c.failover_seconds for c in counts if c.failover_seconds is not None]
    return (
        f"{sum(each.tokens_per_second for each in some) / len(some):,.0f}",
        f"{sum(c.num_moved_blocks for c in counts) / len(some):,.0f}",
        f"{sum(c.num_refused for c in counts) / num_asked:.1%}" if num_asked else "-",
        f"{sum(c.num_remote_blocks for c in counts) / num_read:.1%}",
        f"{sum(c.num_preemptions for c in counts) / len(some):,.0f}",
        f"{sum(c.num_messages for c in counts) / len(some):,.0f}",
        f"{max(failovers):.2f} s" if failovers else "-",
    )


def main() -> None:
    parser = script_parser("lending", __doc__)
    parser.add_argument("--workload", default="sharegpt", help="what arrives (%(default)s)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=1_000, help="of a run (%(default)s)")
    parser.add_argument("--num-engines", type=int, default=8, help="number of engines (%(default)s)")
    parser.add_argument(
        "--pool", type=int, default=512, help="blocks of 16 tokens of an engine (%(default)s)"
    )
    parser.add_argument(
        "--joining-blocks", type=int, default=40, help="of requests that Algorithm 1 expects (%(default)s)"
    )
    parser.add_argument("--killed-at", type=float, default=5.0, help="second of the kill (%(default)s)")
    parser.add_argument("--model", default="llama-2-7b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="a800", help="device to simulate (%(default)s)")
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2], help="seeds (%(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=num_processors(), help="number of parallel processes (one for each core)"
    )
    args = parser.parse_args()
    asked = [(name, seed) for name in configs(args, WorkCostModel()) for seed in args.seed]
    found = in_order(
        partial(run, args), asked, args.jobs, lambda each: print(each, file=sys.stderr, flush=True)
    )
    columns = ("tokens/s", "moved blocks", "refused", "remote", "preemptions", "messages", "failover")
    print(table(("", *columns), rows(found)))
    command = shlex.join(["python", *sys.argv])
    print_result("lending", {"command": command, "runs": [asdict(each) for each in found]}, save=args.save)


if __name__ == "__main__":
    main()
