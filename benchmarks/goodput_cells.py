"""Cells of the table of goodputs: what each is about, one run of it, and lines that say what was found."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

from loong.launcher.model_shape import shape_of
from loong.launcher.simulate.cluster import Hardware
from loong.launcher.simulate.config import LoadConfig, SimulateConfig
from loong.launcher.simulate.points import asked_of, run_point
from loong.model.shapes import find_config
from loong.workloads.slo import parse_slo
from loong.workloads.workload import pace_of

# Of arrivals, where they come by the hundred a second. A backlog must have time to grow beyond the TTFT that
# a rule allows at least: 1 s (tight) or 15 s (loongserve-12).
MOST_SECONDS = {
    ("zipf1.2", "tight"): 60.0,
    ("zipf1.2", "loongserve-12"): 60.0,
    ("zipf1.4", "tight"): 20.0,
    ("zipf1.4", "loongserve-12"): 60.0,
    ("sharegpt", "tight"): 10.0,
    ("sharegpt", "loongserve-12"): 30.0,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What one line is about."""

    model: str
    workload: str
    slo: str
    policy: str


@dataclass(frozen=True, slots=True)
class Setting:
    """How cells are simulated; `duration` is of the arrivals, in seconds, and `precision` relative."""

    device: str
    num_instances: int
    duration: float
    precision: float
    seed: int

    def of(self, cell: Cell) -> "Setting":
        """With the arrivals that a cell has time for."""
        most = MOST_SECONDS.get((cell.workload, cell.slo), self.duration)
        return replace(self, duration=min(self.duration, most))

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
                duration=self.of(cell).duration,
                burstiness=pace_of(cell.workload).burstiness,
            ),
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a cell; `attainment` is None if it was clear early that it would not do."""

    request_rate: float
    attains: bool
    attainment: float | None
    attainment_by_length: dict[str, float | None]
    wall_seconds: float


def run(setting: Setting, cell: Cell, rate: float) -> Point:
    """Simulate a cell at a rate."""
    start, config = perf_counter(), setting.config(cell)
    result = run_point(config, asked_of(config, cell.policy, config.rules[0], rate), cuts_off=True)
    return Point(
        rate,
        result.attains,
        None if result.is_cut_off else result.metrics.attainment,
        {bucket.name: bucket.attainment for bucket in result.metrics.buckets if bucket.num_sent},
        perf_counter() - start,
    )


def rows_of(file: Path) -> Iterator[tuple[Cell, dict[str, object]]]:
    """What a file has, older lines first."""
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        yield Cell(row["model"], row["workload"], row["slo"], row["policy"]), row


def rows_like(file: Path, setting: Setting, commit: str | None) -> Iterator[tuple[Cell, dict[str, object]]]:
    """What a file has of this commit and setting."""
    for cell, row in rows_of(file):
        if {"git_commit": commit, **asdict(setting.of(cell))}.items() <= row.items():
            yield cell, row


def nearby(file: Path, setting: Setting) -> Mapping[Cell, float]:
    """Goodputs of as many of the same devices, at whatever commit: the last that is not 0."""
    return {
        cell: rate
        for cell, row in rows_of(file)
        if (row["device"], row["num_instances"]) == (setting.device, setting.num_instances)
        and (rate := float(str(row["request_rate"])))
    }
