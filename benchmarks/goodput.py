"""P90 goodput of every policy, in virtual time on rooflines: the highest rate at which 90 % meet their SLO.

Each run appends a line to results/goodput_points.jsonl as soon as it is over, and each model, workload, SLO
rule and policy one to results/goodput.jsonl when its goodput is found. What these have for the same commit
and setting is not made again: a run can be stopped and resumed. A search begins where that of another commit
ended. With --request-rate nothing is searched: all run at the same few rates, which tells sooner who is best
where runs take minutes. The table compares each policy with the best of those that never change their groups;
goodput_table.py writes it into docs/goodput.md. No device is needed; of packages, numpy, numba, msgspec,
prometheus-client and tqdm.
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, astuple, dataclass, field
from itertools import product
from operator import attrgetter
from os import cpu_count
from pathlib import Path

import msgspec
from goodput_cells import Cell, Point, Setting, nearby, rows_like, run
from rate_search import CommonRates, RateSearch, Search
from result import FOLDER
from tqdm import tqdm

from loong.launcher.machine import machine_facts
from loong.launcher.simulate.search import guess
from loong.scheduler.policy import POLICIES
from loong.workloads.report import table

MODELS = ("llama-3.1-8b", "lwm-1m")
WORKLOADS = ("sharegpt", "leval", "lveval", "mixed", "zipf1.0", "zipf1.2", "zipf1.4", "victim-attacker")
RULES = ("tight", "loongserve-12")
STATIC_POLICIES = ("tp", "replicas", "static-sp", "chunked", "chunked-replicas", "disaggregated")


@dataclass(slots=True, eq=False)
class CellSearch:
    """The search of one cell, with its runs so far."""

    setting: Setting
    cell: Cell
    search: Search
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Take in a run."""
        self.points.append(point)
        self.search.attempts.attains[point.request_rate] = point.attains

    def found(self) -> dict[str, object]:
        """What was found, for a line of the file."""
        rate = self.search.attempts.rate or 0.0
        best = next((point for point in self.points if point.request_rate == rate), None)
        return {
            "request_rate": rate,
            "attainment_by_length": {} if best is None else best.attainment_by_length,
            "runs": sorted((point.request_rate, point.attainment) for point in self.points),
            "wall_seconds": sum(point.wall_seconds for point in self.points),
        }


@dataclass(frozen=True, slots=True)
class Files:
    """Where goodputs go, and single runs, all of one commit."""

    goodputs: Path
    points: Path
    commit: str | None

    def write(self, file: Path, search: CellSearch, numbers: Mapping[str, object]) -> None:
        """Append a line about a cell."""
        what = {**asdict(search.cell), **asdict(search.setting.of(search.cell))}
        with file.open("a") as lines:
            lines.write(
                json.dumps({"benchmark": "goodput", "git_commit": self.commit, **what, **numbers}) + "\n"
            )


def searches_of(
    setting: Setting, cells: Iterable[Cell], files: Files, rates: Sequence[float]
) -> list[CellSearch]:
    """Searches of the cells that are not found, or these rates of them, with the runs that there are."""
    known = {cell for cell, _ in rows_like(files.goodputs, setting, files.commit)}
    near = nearby(files.goodputs, setting)
    searches = {}
    for cell in cells:
        if cell not in known:
            search = CommonRates(tuple(rates)) if rates else _search_near(near.get(cell), setting, cell)
            searches[cell] = CellSearch(setting, cell, search)
    for cell, row in rows_like(files.points, setting, files.commit):
        if cell in searches:
            searches[cell].add(msgspec.convert(row, Point))
    return list(searches.values())


def _search_near(rate: float | None, setting: Setting, cell: Cell) -> Search:
    first = rate or guess(setting.config(cell))
    return RateSearch(first, setting.precision, is_guess=rate is None)


def search_all(searches: Sequence[CellSearch], files: Files, num_jobs: int) -> None:
    """Run all searches to their end, in so many processes; write each run, and each goodput that is found.

    Idle processes help with searches of which a run is under way.
    """
    left = list(searches)
    running: dict[Future[Point], tuple[CellSearch, float]] = {}
    with (
        ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(left), unit="search", disable=None) as bar,
    ):
        while True:
            for search in [search for search in left if not search.search.next_rates()]:
                if search.search.is_found:
                    files.write(files.goodputs, search, search.found())
                left.remove(search)
                bar.update()
            if not left:
                return
            for search, rate in _next(left, list(running.values()), num_jobs):
                running[pool.submit(run, search.setting, search.cell, rate)] = search, rate
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                search, _ = running.pop(future)
                if search in left:
                    search.add(future.result())
                    files.write(files.points, search, asdict(search.points[-1]))


def _next(
    searches: Sequence[CellSearch], running: Sequence[tuple[CellSearch, float]], num_jobs: int
) -> list[tuple[CellSearch, float]]:
    """What to run on the idle processes: the first wish of each search, in order, and then the others."""
    wishes = [
        (number, search, rate)
        for search in searches
        for number, rate in enumerate(search.search.next_rates())
    ]
    wishes.sort(key=lambda wish: wish[0])
    new = [(search, rate) for _, search, rate in wishes if (search, rate) not in running]
    return new[: num_jobs - len(running)]


def tables(policies: Sequence[str], goodputs: Mapping[Cell, float]) -> Iterator[str]:
    """A table a model and rule, a row a workload: requests per second, and how many times the best static."""
    static = [policy for policy in policies if policy in STATIC_POLICIES]
    others = [policy for policy in policies if policy not in STATIC_POLICIES]
    for model, slo in dict.fromkeys((cell.model, cell.slo) for cell in goodputs):
        rows = []
        for workload in dict.fromkeys(cell.workload for cell in goodputs):
            rates = {policy: goodputs.get(Cell(model, workload, slo, policy)) for policy in policies}
            best = max((rates[policy] or 0.0 for policy in static), default=0.0)
            rows.append((workload, *map(_rate, rates.values()), *(_times(rates[p], best) for p in others)))
        yield table((f"{model}, {slo}", *policies, *(f"{p} / static" for p in others)), rows)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"


def _times(rate: float | None, best: float) -> str:
    return f"{rate / best:.2f}x" if rate is not None and best else "-"


def common_rates(searches: Sequence[CellSearch]) -> str:
    """A table of the runs: what attained at which rate, and what did not."""
    return table(
        ("model", "workload", "SLO", "policy", "req/s", "attains"),
        [
            (*astuple(search.cell), f"{point.request_rate:.4g}", "yes" if point.attains else "no")
            for search in searches
            for point in sorted(search.points, key=attrgetter("request_rate"))
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--workload", nargs="+", default=WORKLOADS)
    parser.add_argument("--slo", nargs="+", default=RULES)
    parser.add_argument("--policy", nargs="+", default=tuple(POLICIES))
    parser.add_argument("--device", default="h200")
    parser.add_argument("--num-instances", type=int, default=8)
    parser.add_argument("--request-rate", nargs="+", type=float, default=(), help="only these, of all")
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cpu_count())
    parser.add_argument("--file", type=Path, default=FOLDER / "goodput.jsonl", help="lines, old and new")
    parser.add_argument("--points", type=Path, default=FOLDER / "goodput_points.jsonl", help="all runs")
    args = parser.parse_args()
    setting = Setting(args.device, args.num_instances, args.duration, args.precision, args.seed)
    facts = machine_facts()
    files = Files(args.file, args.points, facts.get("git_commit"))
    cells = [Cell(*names) for names in product(args.model, args.workload, args.slo, args.policy)]
    searches = searches_of(setting, cells, files, args.request_rate)
    search_all(searches, files, args.jobs)
    if args.request_rate:
        print(common_rates(searches))
    else:
        known = rows_like(args.file, setting, files.commit)
        goodputs = {cell: float(str(row["request_rate"])) for cell, row in known}
        print("\n\n".join(tables(args.policy, {cell: goodputs[cell] for cell in cells})))
    print(json.dumps({"benchmark": "goodput", "machine": facts, **asdict(setting)}))


if __name__ == "__main__":
    main()
