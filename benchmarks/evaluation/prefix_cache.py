"""Serving with the prefix cache and without it, in virtual time: latency, throughput and goodput.

Each workload is simulated twice, on each number of devices: at one rate, the same for both. Sessions end one
after the other, so that the load falls towards the end. So requests that end within `--window` seconds of the
first arrival are counted, too. With
`--goodput`, rates are searched for the highest at which `--attainment` of each length class meets the SLO.
The two runs differ in the cache alone. Needs no device.

    python benchmarks/evaluation/prefix_cache.py --workload agents --rate 20 --num-requests 500
    python benchmarks/evaluation/prefix_cache.py --workload 'leval(4)' --goodput --num-requests 100
"""

import argparse
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import PointResult, asked_of, run_point
from loong.simulation.search import search
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.report import table
from loong.workloads.workload import pace_of

PRECISION = 0.1  # of a goodput


@dataclass(frozen=True, slots=True)
class Cell:
    """A run, or (`goodput` in requests/s) the best of a search. Times are seconds, shares are of input.

    `num_early` requests have ended after `window` seconds.
    """

    workload: str
    policy: str
    num_instances: int
    is_cached: bool
    goodput: float | None
    request_throughput: float
    window: float
    num_early: int
    median_ttft: float | None
    median_tpot: float | None
    hits: float | None
    ideal: float | None


def cell_of(workload: str, num_instances: int, args: argparse.Namespace, *, is_cached: bool) -> Cell:
    """Simulate one cell."""
    config = SimulateConfig(
        args.model,
        (args.policy,),
        (parse_slo(args.slo),),
        (args.rate,),
        Hardware(shape_of(find_config(args.model, "dummy")), args.device, num_instances),
        SimulatedLoadConfig(workload, args.seed, args.num_requests, burstiness=pace_of(workload).burstiness),
        precision=PRECISION if args.goodput else None,
        goal=args.attainment,
        is_per_class=args.goodput,
        keeps_prefixes=is_cached,
    )
    rule = config.rules[0]
    if not args.goodput:
        point = run_point(config, asked_of(config, args.policy, rule, args.rate))
        return shown(workload, num_instances, point, None, args, is_cached=is_cached)
    found = search(config, args.policy, rule, PRECISION)
    point = found.best if found.best is not None else found.points[0]
    return shown(workload, num_instances, point, found.rate, args, is_cached=is_cached)


def shown(
    workload: str,
    num_instances: int,
    point: PointResult,
    goodput: float | None,
    args: argparse.Namespace,
    *,
    is_cached: bool,
) -> Cell:
    """Return the numbers of a run."""
    metrics, columns = point.metrics, point.columns
    latencies = metrics.latencies
    arrivals = cast("list[float]", columns["arrival_times"])
    lengths = cast("list[float | None]", columns["e2els"])  # None: not completed
    ends = zip(arrivals, lengths, strict=True)
    return Cell(
        workload,
        args.policy,
        num_instances,
        is_cached,
        goodput,
        metrics.request_throughput,
        args.window,
        sum(length is not None and arrival + length <= args.window for arrival, length in ends),
        latencies.ttft["median"] if latencies.ttft else None,
        latencies.tpot["median"] if latencies.tpot else None,
        metrics.hit_rate,
        metrics.ideal_hit_rate,
    )


def main() -> None:
    parser = script_parser("prefix_cache", __doc__)
    parser.add_argument("--workload", nargs="+", default=["agents"], help="workloads (%(default)s)")
    parser.add_argument("--num-instances", type=int, nargs="+", default=[4, 8], help="numbers (%(default)s)")
    parser.add_argument("--policy", default="esp", help="policy (%(default)s)")
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=500, help="of each run (%(default)s)")
    parser.add_argument(
        "--window",
        type=float,
        default=240.0,
        metavar="S",
        help="seconds in which ends are counted (%(default)g)",
    )
    parser.add_argument("--goodput", action="store_true", help="search the highest rate that attains")
    parser.add_argument("--slo", default="tight", help="SLO of a goodput (%(default)s)")
    parser.add_argument("--attainment", type=float, default=0.9, help="share that meets it (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (%(default)s)")
    args = parser.parse_args()
    cells = []
    for workload in args.workload:
        for num_instances in args.num_instances:
            for is_cached in (True, False):
                cells.append(cell_of(workload, num_instances, args, is_cached=is_cached))
                print(cells[-1], file=sys.stderr, flush=True)
    early = f"ended in {args.window:g} s"
    header = (
        "workload",
        "devices",
        "cache",
        "goodput",
        "requests/s",
        early,
        "TTFT p50 s",
        "TPOT p50 s",
        "hits",
    )
    rows = [
        (
            cell.workload,
            str(cell.num_instances),
            "on" if cell.is_cached else "off",
            *(number(value) for value in (cell.goodput, cell.request_throughput)),
            str(cell.num_early),
            *(number(value) for value in (cell.median_ttft, cell.median_tpot, cell.hits)),
        )
        for cell in cells
    ]
    print(table(header, rows))
    runs = [asdict(cell) for cell in cells]
    print_result("prefix_cache", {"command": shlex.join(["python", *sys.argv]), "runs": runs}, save=args.save)


def number(value: float | None) -> str:
    """Return a number with three digits; - if there is none."""
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
