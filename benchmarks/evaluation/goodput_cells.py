"""Cells of all-class goodput in virtual time: one search each, kept as a line of a file, never repeated."""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass
from math import inf
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeAlias

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import FOLDER

from loong.hardware.machine import machine_facts
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.processes.gc_tuning import tune_gc
from loong.runs.goodput import Goodput
from loong.simulation.cluster import Hardware
from loong.simulation.config import CLASS_REQUESTS, SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import PointResult
from loong.simulation.search import search
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.workload import pace_of

JSONObject: TypeAlias = "dict[str, Any]"

FILE = FOLDER / "all_class_goodput.jsonl"
# With these, every class of prompt length has at least the 20 requests that are needed to judge it.
NUM_REQUESTS = {"mixed": 250, "zipf1.0": 700}


@dataclass(frozen=True, slots=True)
class Cell:
    """One goodput: of a policy under a rule, for the requests of one seed."""

    workload: str
    slo: str
    policy: str
    seed: int
    model: str
    device: str
    num_instances: int
    num_hosts: int
    num_requests: int
    precision: float

    def config(self) -> SimulateConfig:
        """Return the configuration of the cell's simulation. Raises `ConfigError` if it is impossible."""
        shape = shape_of(find_config(self.model, "dummy"))
        config = SimulateConfig(
            model=self.model,
            policies=(self.policy,),
            rules=(parse_slo(self.slo, workload=self.workload),),
            rates=(),
            hardware=Hardware(shape, self.device, self.num_instances, num_hosts=self.num_hosts),
            load=SimulatedLoadConfig(
                self.workload,
                self.seed,
                num_requests=self.num_requests,
                burstiness=pace_of(self.workload).burstiness,
            ),
            is_per_class=True,
        )
        config.hardware.cluster(self.policy)
        return config


@dataclass(frozen=True, slots=True)
class Bounds:
    """A goodput: at least `rate`, and less than `too_high` requests a second."""

    rate: float
    too_high: float


def add_cell_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the simulated cells and of the results' file."""
    parser.add_argument("--model", default="llama-3.1-8b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="h200", help="device to simulate (%(default)s)")
    parser.add_argument("--num-instances", type=int, default=8, help="number of instances (%(default)s)")
    parser.add_argument("--num-hosts", type=int, default=1, help="number of their hosts (%(default)s)")
    parser.add_argument(
        "--num-requests",
        type=int,
        help=f"of each run (mixed: {NUM_REQUESTS['mixed']}, zipf1.0: {NUM_REQUESTS['zipf1.0']}, "
        f"others: {CLASS_REQUESTS})",
    )
    parser.add_argument(
        "--precision", type=float, default=0.1, help="relative precision of a goodput (%(default)s)"
    )
    parser.add_argument(
        "--seed", nargs="+", type=int, default=[0, 1], help="seeds of the requests (%(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of parallel processes (one for each core)",
    )
    parser.add_argument(
        "--file", type=Path, default=FILE, help="file with the lines of all cells, old and new (%(default)s)"
    )
    parser.add_argument("--show", action="store_true", help="search nothing, show what the file has")


def cells_of(
    args: argparse.Namespace, workloads: Sequence[str], rules: Sequence[str], policies: Sequence[str]
) -> list[Cell]:
    """Return all cells that the flags ask for; those of one seed come before those of the next."""
    return [
        Cell(
            workload,
            slo,
            policy,
            seed,
            args.model,
            args.device,
            args.num_instances,
            args.num_hosts,
            args.num_requests or NUM_REQUESTS.get(workload, CLASS_REQUESTS),
            args.precision,
        )
        for seed in args.seed
        for workload in workloads
        for slo in rules
        for policy in policies
    ]


def found_in(file: Path, cells: Sequence[Cell]) -> dict[Cell, Bounds]:
    """Return the cells that the file has."""
    asked, found = set(cells), {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        cell = Cell(**{name: row[name] for name in Cell.__slots__})
        if cell in asked:
            found[cell] = Bounds(row["request_rate"], row["too_high_rate"] or inf)
    return found


def find_all(cells: Sequence[Cell], file: Path, num_jobs: int) -> dict[Cell, Bounds]:
    """Search the cells that the file lacks, write each goodput as it is found, and return all.

    Raises:
        ConfigError: a cell cannot be simulated; nothing was searched then.
    """
    missing = [cell for cell in cells if cell not in found_in(file, cells)]
    for cell in missing:
        cell.config()
    facts, command = machine_facts(), shlex.join(["python", *sys.argv])
    for number, (cell, numbers) in enumerate(_searched(missing, num_jobs), 1):
        row = {
            "benchmark": "all_class_goodput",
            **asdict(cell),
            **numbers,
            "command": command,
            "machine": facts,
        }
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        reported = " ".join(map(str, astuple(cell)[:4]))
        print(
            f"{number}/{len(missing)} {reported}: {numbers['request_rate']:.3g} requests/s, "
            f"{numbers['cpu_seconds']:.0f} s of a processor",
            file=sys.stderr,
            flush=True,
        )
    return found_in(file, cells)


def _searched(cells: Sequence[Cell], num_jobs: int) -> Iterator[tuple[Cell, JSONObject]]:
    """Yield the result of each cell, in the order in which they are found."""
    if num_jobs == 1:
        tune_gc()
        yield from ((cell, search_cell(cell)) for cell in cells)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=tune_gc) as pool:
        futures = {pool.submit(search_cell, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def search_cell(cell: Cell) -> JSONObject:
    """Search the goodput of a cell, and return its line."""
    start, cpu_start, config = perf_counter(), process_time(), cell.config()
    numbers = _numbers(search(config, cell.policy, config.rules[0], cell.precision))
    numbers["wall_seconds"] = perf_counter() - start
    numbers["cpu_seconds"] = process_time() - cpu_start
    return numbers


def _numbers(found: Goodput[PointResult]) -> JSONObject:
    best = found.best
    return {
        "request_rate": found.rate,
        "too_high_rate": found.too_high_rate,
        "rates": [(point.rate, point.attains) for point in found.points],
        "capacity_share": None if best is None or best.used is None else best.used.share,
        "slo_attainment": None if best is None else best.metrics.attainment,
        "by_prompt_length": {}
        if best is None
        else {b.name: [b.num_sent, b.attainment] for b in best.metrics.buckets if b.num_sent},
    }


def by_seed(values: Sequence[Bounds | None]) -> str:
    """Return the goodput of each seed, or once if all agree; a dash for one that is not known."""
    reported = ["-" if value is None else _reported(value) for value in values]
    return " / ".join(reported if len(set(reported)) > 1 else reported[:1])


def _reported(bounds: Bounds) -> str:
    return f"{'≥ ' if bounds.too_high == inf else ''}{bounds.rate:.2g}"
