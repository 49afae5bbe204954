"""Pareto curves: the throughput of a device against the speed for a user.

The speed is 1 / median TPOT of a run, in tokens/s/user. InferenceMAX calls it interactivity. It is the median
of AIPerf's output token throughput per user. The throughput is of output tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from loong.workloads.metrics.result import JSON
from loong.workloads.report.run_document import RuleRuns, RunRow, Spread, spread_of

Point: TypeAlias = tuple[float, float]
Key: TypeAlias = tuple[str, float]
"""A policy and a rate."""


class DeviceUnit(Enum):
    """The unit of which a throughput is: a GPU, a rank on a CPU, or a whole server."""

    GPU = "GPU"
    RANK = "CPU rank"
    SERVER = "server"

    @classmethod
    def of_device(cls, device: str) -> "DeviceUnit":
        """Return the unit of servers on a kind of device; `cpu` is the only one that is no GPU."""
        return cls.RANK if device == "cpu" else cls.GPU


_UNITS = {unit.value: unit for unit in DeviceUnit}


@dataclass(frozen=True, slots=True)
class Devices:
    """The number of devices of a server: its instances times their tensor-parallel ranks."""

    number: int
    unit: DeviceUnit


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One run: the median TPOT in seconds, the output tokens/s, and the devices, None if unknown."""

    policy: str
    rate: float
    tpot: float | None
    output_throughput: float
    devices: Devices | None

    @property
    def speed(self) -> float | None:
        """Return the output tokens/s/user; None where no answer has two pieces."""
        return 1.0 / self.tpot if self.tpot else None

    @property
    def throughput_per_device(self) -> float | None:
        """Return the output tokens/s of a device; None if the number of devices is unknown."""
        return None if self.devices is None else self.output_throughput / self.devices.number

    def as_json(self) -> dict[str, JSON]:
        """Return the members of the document of the run."""
        return {
            "num_devices": None if self.devices is None else self.devices.number,
            "device_unit": None if self.devices is None else self.devices.unit.value,
            "output_throughput_per_device": self.throughput_per_device,
            "output_throughput_per_user": self.speed,
        }


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A policy at a rate: spreads of its repetitions, in output tokens/s/user and output tokens/s/unit.

    No point of the policy dominates one that `is_best`, and none of any policy one that `is_best_of_all`.
    """

    policy: str
    rate: float
    speed: Spread
    throughput: Spread
    is_best: bool
    is_best_of_all: bool

    @property
    def frontiers(self) -> str:
        """Return the frontiers that the point is on, in words."""
        if self.is_best_of_all:
            return "of all"
        return "its own" if self.is_best else "-"


@dataclass(frozen=True, slots=True)
class ParetoCurves:
    """The points of all policies, by policy and ascending rate.

    The unit is a server unless the devices of every run are known, and are all of one kind.
    """

    unit: DeviceUnit
    points: tuple[ParetoPoint, ...]

    def of(self, policy: str) -> list[ParetoPoint]:
        """Return the points of a policy."""
        return [point for point in self.points if point.policy == policy]


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one dominates, by ascending first coordinate.

    A point dominates another if it is at least as great in both coordinates, and greater in one.
    """
    kept: list[Point] = []
    for point in sorted(points, reverse=True):
        if not kept or point[1] > kept[-1][1] or point == kept[-1]:
            kept.append(point)
    return kept[::-1]


def pareto_curves(runs: Sequence[SpeedRun]) -> ParetoCurves:
    """Return the curves of runs; repetitions of a policy at a rate are one point, of their medians."""
    units = {None if run.devices is None else run.devices.unit for run in runs}
    unit = next(iter(units)) if len(units) == 1 else None
    spreads = _spreads(runs, is_per_server=unit is None)
    medians = {key: (speed[0], throughput[0]) for key, (speed, throughput) in spreads.items()}
    best_of_all = set(frontier(medians.values()))
    best = {name: set(frontier(m for (n, _), m in medians.items() if n == name)) for name, _ in medians}
    return ParetoCurves(
        unit or DeviceUnit.SERVER,
        tuple(
            ParetoPoint(policy, rate, *spread, median in best[policy], median in best_of_all)
            for (policy, rate), spread in spreads.items()
            for median in (medians[policy, rate],)
        ),
    )


def _spreads(runs: Sequence[SpeedRun], *, is_per_server: bool) -> dict[Key, tuple[Spread, Spread]]:
    """Return the spreads of speed and throughput, by policy in the order of runs, and by rate."""
    place = {policy: index for index, policy in enumerate(dict.fromkeys(run.policy for run in runs))}
    repeats: dict[Key, list[SpeedRun]] = {}
    for run in sorted(runs, key=lambda run: (place[run.policy], run.rate)):
        repeats.setdefault((run.policy, run.rate), []).append(run)
    spreads = {}
    for key, same in repeats.items():
        speed = spread_of([run.speed for run in same])
        throughput = spread_of(
            [run.output_throughput if is_per_server else run.throughput_per_device for run in same]
        )
        if speed is not None and throughput is not None:
            spreads[key] = speed, throughput
    return spreads


def curves_of(runs: RuleRuns) -> ParetoCurves:
    """Return the curves of the runs of a document that went to their ends."""
    return pareto_curves([_speed_run(run) for run in runs.runs if not run.is_cut_off])


def _speed_run(run: RunRow) -> SpeedRun:
    number, unit = run.number("num_devices"), _UNITS.get(str(run.numbers.get("device_unit")))
    milliseconds = run.number("median_tpot_ms")
    return SpeedRun(
        run.policy,
        run.request_rate,
        None if milliseconds is None else milliseconds / 1e3,
        run.number("output_throughput") or 0.0,
        Devices(int(number), unit) if number and unit is not None else None,
    )
