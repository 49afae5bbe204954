"""P90 goodput of every policy, in virtual time on rooflines: the highest rate at which 90 % meet their SLO.

A line for each model, workload, SLO rule and policy goes to results/goodput.jsonl (or `--file`) as soon as it
is found, and what is there already for the same commit and setting is not made again: a run can be stopped
and resumed. A search begins where that of another commit ended, if the file has it. The table compares each
policy with the best of those that never change their groups. No device is needed; of packages, numpy, numba,
msgspec, prometheus-client and tqdm.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from os import cpu_count
from pathlib import Path
from time import perf_counter

from result import FOLDER

from loong.launcher.goodput import Goodput
from loong.launcher.machine import machine_facts
from loong.launcher.model_shape import shape_of
from loong.launcher.simulate.cluster import Hardware
from loong.launcher.simulate.config import LoadConfig, SimulateConfig
from loong.launcher.simulate.parallel import done
from loong.launcher.simulate.points import PointResult
from loong.launcher.simulate.search import search
from loong.model.shapes import find_config
from loong.scheduler.policy import POLICIES
from loong.workloads.report import table
from loong.workloads.slo import parse_slo
from loong.workloads.workload import pace_of

MODELS = ("llama-3.1-8b", "lwm-1m")
WORKLOADS = ("sharegpt", "leval", "lveval", "mixed", "zipf1.0", "zipf1.2", "zipf1.4", "victim-attacker")
RULES = ("tight", "loongserve-12")
STATIC_POLICIES = ("tp", "replicas", "static-sp", "chunked", "chunked-replicas", "disaggregated")
MOST_SECONDS = {
    "zipf1.2": 60.0,
    "zipf1.4": 20.0,
    "sharegpt": 10.0,
}  # where requests come by the hundred a second


@dataclass(frozen=True, slots=True)
class Cell:
    """What one line is about."""

    model: str
    workload: str
    slo: str
    policy: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all lines of a run share; `duration` is of the arrivals, in seconds, and `precision` relative."""

    device: str
    num_instances: int
    duration: float
    precision: float
    seed: int

    def of(self, workload: str) -> "Setting":
        """With the arrivals that a workload has time for."""
        return replace(self, duration=min(self.duration, MOST_SECONDS.get(workload, self.duration)))

    def config(self, cell: Cell) -> SimulateConfig:
        """How a cell is simulated."""
        return SimulateConfig(
            model=cell.model,
            policies=(cell.policy,),
            rules=(parse_slo(cell.slo),),
            rates=(),
            hardware=Hardware(shape_of(find_config(cell.model, "dummy")), self.device, self.num_instances),
            load=LoadConfig(
                cell.workload,
                self.seed,
                duration=self.duration,
                burstiness=pace_of(cell.workload).burstiness,
            ),
            precision=self.precision,
        )


def find(setting: Setting, near: Mapping[Cell, float], cell: Cell) -> dict[str, object]:
    """The goodput of a cell, as a line of the file."""
    start = perf_counter()
    setting = setting.of(cell.workload)
    config = setting.config(cell)
    goodput = search(config, cell.policy, config.rules[0], setting.precision, near=near.get(cell))
    return {**asdict(cell), **asdict(setting), **_numbers(goodput), "wall_seconds": perf_counter() - start}


def _numbers(goodput: Goodput[PointResult]) -> dict[str, object]:
    attained = [(p.rate, None if p.is_cut_off else p.metrics.attainment) for p in goodput.points]
    by_length = {}
    if goodput.best is not None:
        by_length = {b.name: b.attainment for b in goodput.best.metrics.buckets if b.num_sent}
    return {"request_rate": goodput.rate, "attainment_by_length": by_length, "runs": attained}


def rows_of(file: Path) -> list[tuple[Cell, dict[str, object]]]:
    """What a file has, older lines first."""
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return [(Cell(row["model"], row["workload"], row["slo"], row["policy"]), row) for row in rows]


def known(file: Path, setting: Setting, commit: str | None) -> dict[Cell, float]:
    """Goodputs that a file has for this commit and setting."""
    return {
        cell: float(str(row["request_rate"]))
        for cell, row in rows_of(file)
        if row["git_commit"] == commit and asdict(setting.of(cell.workload)).items() <= row.items()
    }


def nearby(file: Path, setting: Setting) -> dict[Cell, float]:
    """Goodputs of as many of the same devices, at whatever commit: the last that is not 0."""
    return {
        cell: rate
        for cell, row in rows_of(file)
        if (row["device"], row["num_instances"]) == (setting.device, setting.num_instances)
        and (rate := float(str(row["request_rate"])))
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--workload", nargs="+", default=WORKLOADS)
    parser.add_argument("--slo", nargs="+", default=RULES)
    parser.add_argument("--policy", nargs="+", default=tuple(POLICIES))
    parser.add_argument("--device", default="h200")
    parser.add_argument("--num-instances", type=int, default=8)
    parser.add_argument("--duration", type=float, default=300.0)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cpu_count())
    parser.add_argument("--file", type=Path, default=FOLDER / "goodput.jsonl", help="lines, old and new")
    args = parser.parse_args()
    setting = Setting(args.device, args.num_instances, args.duration, args.precision, args.seed)
    facts = machine_facts()
    commit = facts.get("git_commit")
    goodputs = known(args.file, setting, commit)
    cells = [Cell(*names) for names in product(args.model, args.workload, args.slo, args.policy)]
    missing = [cell for cell in cells if cell not in goodputs]
    work = partial(find, setting, nearby(args.file, setting))
    with args.file.open("a") as file:
        for index, line in done(work, missing, args.jobs, "search"):
            file.write(json.dumps({"benchmark": "goodput", "git_commit": commit, **line}) + "\n")
            file.flush()
            goodputs[missing[index]] = float(str(line["request_rate"]))
    print("\n\n".join(tables(args.policy, {cell: goodputs[cell] for cell in cells})))
    print(json.dumps({"benchmark": "goodput", "machine": facts, **asdict(setting)}))


if __name__ == "__main__":
    main()
