"""LoongServe's figures 10 and 11 in its own setting, in virtual time: the highest rates within its bounds.

LWM-1M on pairs of A800s: four pairs of one node (figure 10), or eight of two nodes (figure 11, `mixed`
alone). As in the paper's artifact, bounds hold for means of a run, and no prefix is cached. A run has the
arrivals of `--duration` seconds: long enough that waiting in overload exceeds the bounds. vLLM and LightLLM
with SplitFuse are `tp` and `lightllm`, one instance of eight GPUs. On two nodes they are `replicas` and
`chunked-replicas`, one such instance a node. The bounds of a token are targets of requests, for which `esp`
plans. With `--rate` the means of one run are shown, in milliseconds: E2EL a token, TTFT a prompt token, and
the rest an output token. What is saved is not repeated. Needs no device.

    python benchmarks/evaluation/loongserve_figures.py --save                                   # an hour
    python benchmarks/evaluation/loongserve_figures.py --workload leval --policy esp esp-paper  # minutes
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import FOLDER, print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.processes.gc_tuning import tune_gc
from loong.runs.goodput import search
from loong.runs.run_tables import NOT_RUN
from loong.scheduler.config import PolicyConfig
from loong.simulation.arrivals import is_admissible
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import PointResult, asked_of, run_point
from loong.workloads.metrics.slo import Judged, SLORule, parse_slo
from loong.workloads.report.report import table

NAME = "loongserve_figures"
MODEL, DEVICE, PAIRS_OF_A_NODE = "lwm-1m", "a800", 4
POLICIES = ("esp", "esp-paper", "esp-fixed-4", "static-sp", "replicas", "tp", "lightllm")
POLICIES_OF_NODES = ("esp", "esp-paper", "esp-fixed-4", "replicas", "chunked-replicas")
ONE_A_NODE = ("replicas", "chunked-replicas")  # on several nodes
SPLIT_FUSE_TOKENS = {"sharegpt": 256, "leval": 2048, "lveval": 16384, "mixed": 2048}  # of a step, as there
SECONDS = {"sharegpt": 30.0, "leval": 300.0, "lveval": 1000.0, "mixed": 500.0}  # the artifact has 1,000
FEWEST = 100  # requests of a run
PUBLISHED = {  # requests per second of LoongServe, vLLM, and LightLLM with SplitFuse
    "sharegpt": (29.47, 6.35, 23.1),
    "leval": (2.416, 1.144, 1.231),
    "lveval": (0.201, 0.090, 0.082),
    "mixed": (0.553, 0.208, 0.144),
}
PUBLISHED_OF_NODES = "LoongServe: 1.86 times vLLM, 3.37 times LightLLM"
MEANS_OF_NODES = SLORule(
    "loongserve-11",
    normalized=0.065,
    normalized_input=0.064,
    normalized_output=0.200,
    judged=Judged.MEAN,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One search: a policy on a workload, with the arrivals of `duration` seconds of a seed."""

    num_nodes: int
    workload: str
    policy: str
    duration: float
    seed: int
    precision: float
    rate: float | None = None  # the only one that is tried, if given

    @property
    def rule(self) -> SLORule:
        """Return the bounds of its figure."""
        return parse_slo("loongserve-10", workload=self.workload) if self.num_nodes == 1 else MEANS_OF_NODES

    @property
    def hardware(self) -> Hardware:
        """Return its pairs, or the instances of whole nodes."""
        shape, num_nodes = shape_of(find_config(MODEL, "dummy")), self.num_nodes
        if num_nodes > 1 and self.policy in ONE_A_NODE:
            return Hardware(shape, DEVICE, num_nodes, 2 * PAIRS_OF_A_NODE, num_hosts=num_nodes)
        return Hardware(shape, DEVICE, PAIRS_OF_A_NODE * num_nodes, 2, num_hosts=num_nodes)

    def config(self, rate: float) -> SimulateConfig:
        """Return the configuration of a run at that rate."""
        num_requests = max(FEWEST, round(rate * self.duration))
        return SimulateConfig(
            model=MODEL,
            policies=(self.policy,),
            rules=(self.rule,),
            rates=(),
            hardware=self.hardware,
            load=SimulatedLoadConfig(self.workload, self.seed, num_requests, burstiness=1.0),
            policy=PolicyConfig(chunk_tokens=SPLIT_FUSE_TOKENS[self.workload]),
            keeps_prefixes=False,
        )


def run(cell: Cell, rate: float) -> PointResult:
    """Simulate a cell at a rate."""
    config = cell.config(rate)
    return run_point(config, asked_of(config, cell.policy, config.rules[0], rate), is_reported=True)


def find(cell: Cell, first_rate: float) -> dict[str, Any]:
    """Search the rate of a cell, or try its own; there are no runs if the policy refuses some request."""
    config, start = cell.config(first_rate), process_time()
    cluster = config.hardware.cluster(cell.policy)
    if not all(is_admissible(request, cluster) for request in config.load.at(first_rate).measured):
        return {"runs": []}
    if cell.rate is not None:
        point = run(cell, cell.rate)
        return {"runs": [numbers_of(point)], "cpu_seconds": process_time() - start}
    found = search(cell.policy, cell.rule, lambda rate: run(cell, rate), first_rate, cell.precision)
    return {
        "request_rate": found.rate,
        "too_high_rate": found.too_high_rate,
        "runs": [numbers_of(point) for point in found.points],
        "cpu_seconds": process_time() - start,
    }


def numbers_of(point: PointResult) -> dict[str, Any]:
    """Return a run's rate, whether it attains, and its means in milliseconds."""
    means = {
        name: distribution and distribution["mean"] * 1e3
        for name, distribution in point.metrics.latencies.by_name().items()
    }
    return {
        "rate": point.rate,
        "attains": point.attains,
        "num_sent": point.metrics.num_sent,
        "num_failed": point.metrics.num_failed,
        "request_throughput": point.metrics.request_throughput,
        "means_ms": means,
    }


def saved() -> dict[Cell, dict[str, Any]]:
    """Return the searches in the file."""
    path = FOLDER / f"{NAME}.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Cell(**{name: row.get(name) for name in Cell.__slots__}): row for row in rows}


def find_all(cells: Sequence[Cell], first_rate: float | None, *, save: bool) -> dict[Cell, dict[str, Any]]:
    """Search the cells that the file lacks, save each as it is found, and return all."""
    found, command = saved(), shlex.join(["python", *sys.argv])
    for cell in cells:
        if cell not in found:
            found[cell] = find(cell, first_rate or PUBLISHED[cell.workload][0])
            print_result(NAME, {**asdict(cell), "command": command, **found[cell]}, save=save)
    return found


def rows(
    cells: Sequence[Cell], found: Mapping[Cell, Mapping[str, Any]], policies: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return a row for each workload: the rate of each policy by seed, then what is published."""
    by_row: dict[tuple[int, str], dict[str, list[str]]] = {}
    for cell in cells:
        row = by_row.setdefault((cell.num_nodes, cell.workload), {})
        row.setdefault(cell.policy, []).append(shown(found[cell]))
    return [
        (
            f"{workload}, {num_nodes} nodes" if num_nodes > 1 else workload,
            *(" / ".join(dict.fromkeys(row.get(policy, [NOT_RUN]))) for policy in policies),
            PUBLISHED_OF_NODES if num_nodes > 1 else " / ".join(f"{rate:g}" for rate in PUBLISHED[workload]),
        )
        for (num_nodes, workload), row in by_row.items()
    ]


def shown(numbers: Mapping[str, Any]) -> str:
    """Return the rate that was found, or the means of the only run that was made, in milliseconds."""
    if not numbers["runs"]:
        return NOT_RUN
    if "request_rate" in numbers:
        return f"{numbers['request_rate']:.3g}"
    means = numbers["runs"][0]["means_ms"]
    return ", ".join(f"{means[name]:.3g}" for name in ("normalized", "normalized_input", "normalized_output"))


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Return all cells that the flags ask for."""
    return [
        Cell(
            num_nodes,
            workload,
            policy,
            args.duration or SECONDS[workload],
            seed,
            args.precision,
            args.rate,
        )
        for num_nodes in args.num_nodes
        for workload in args.workload
        for policy in args.policy or (POLICIES if num_nodes == 1 else POLICIES_OF_NODES)
        for seed in args.seed
    ]


def main() -> None:
    """Search all rates and print the table."""
    parser = script_parser(NAME, __doc__)
    parser.add_argument("--workload", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--policy", nargs="+", help=f"({' '.join(POLICIES)}; of several nodes others)")
    parser.add_argument("--num-nodes", nargs="+", type=int, default=[1], help="nodes of eight GPUs (1)")
    parser.add_argument("--duration", type=float, help="seconds of arrivals (by the workload)")
    parser.add_argument("--rate", type=float, help="rate of one run, instead of a search (none)")
    parser.add_argument("--first-rate", type=float, help="rate that a search begins with (the published one)")
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="seeds of the requests (0)")
    parser.add_argument("--precision", type=float, default=0.1, help="relative precision (%(default)s)")
    args = parser.parse_args()
    tune_gc()
    cells = cells_of(args)
    found = find_all(cells, args.first_rate, save=args.save)
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    columns = table(
        ("requests/s", *policies, "published: LoongServe / vLLM / LightLLM"), rows(cells, found, policies)
    )
    print(columns)


if __name__ == "__main__":
    main()
