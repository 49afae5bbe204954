"""The load of a benchmark where flags say `auto`: its lengths, rate and number, for about a minute."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from math import inf
from typing import TypeAlias

from loong.launcher.bench.config import BenchLoadConfig, longest_of
from loong.simulation.capacity import LOAD_SHARE, NUM_SAMPLED, rounded_down
from loong.workloads.metrics.backlog import WorkOf
from loong.workloads.report.pareto import Devices
from loong.workloads.request import RequestShape, WorkloadRequest
from loong.workloads.workload import endless_workload

RUN_SECONDS = 60.0
SMALLEST_SCALE = Fraction(1, 256)
DEFAULT_NUM_REQUESTS = 100  # at a rate that was asked for
FEWEST_REQUESTS = 20  # of a load that is chosen, however long they take
MOST_REQUESTS = 2_000  # of a chosen load: all are drawn and encoded before the first is sent
ASSUMED_MAX_TOKENS = 8192  # where a server does not say what it takes

Capacity: TypeAlias = Callable[[Sequence[RequestShape]], float]
"""Requests per second that are completed of such shapes, predicted or measured."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The parts of a load that are to be chosen."""

    length_scale: bool = False
    request_rate: bool = False
    num_requests: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """The longest request and the capacity of servers.

    `max_tokens` is of a prompt and its answer, None if no server reports it. `capacity` chooses the lengths.
    `rate_capacity`, where it is better known but costly, chooses the rate. `source` says where the rate's
    capacity comes from: "the cost model predicts". `work_of` is by the cost model of our servers, None of
    others. `devices` are of our servers, by name.
    """

    max_tokens: int | None
    capacity: Capacity
    source: str
    rate_capacity: Capacity | None = None
    work_of: WorkOf | None = None
    devices: Mapping[str, Devices] = field(default_factory=dict)


def choose_load(
    load: BenchLoadConfig, auto: Auto, served: Served, num_repeats: int
) -> tuple[BenchLoadConfig, tuple[str, ...]]:
    """Return `load` with its `auto` values chosen, and the line that explains the choice.

    The length scale is the largest power of two by which every request of all repetitions fits. Two thirds of
    the capacity must also be at least the rate asked for. Without a rate, they must be enough for
    `NUM_SAMPLED` requests (or those asked for) in the time of a run. The rate is two thirds of the capacity.
    """
    if auto == Auto():
        return load, ()
    choice = _Choice(load, auto, served, num_repeats)
    chosen, capacity = choice.best() if auto.length_scale else (load, None)
    rate_capacity = served.rate_capacity if auto.request_rate else None
    if not auto.length_scale or rate_capacity is not None:
        chosen, capacity = choice.at(chosen.length_scale, rate_capacity)
    return chosen, (choice.words(chosen, capacity),)


@dataclass(frozen=True, slots=True)
class _Choice:
    load: BenchLoadConfig
    auto: Auto
    served: Served
    num_repeats: int

    @property
    def max_tokens(self) -> int:
        return self.served.max_tokens or ASSUMED_MAX_TOKENS

    @property
    def seconds(self) -> float:
        return self.load.duration or RUN_SECONDS

    @property
    def least_rate(self) -> float:
        """Return the rate that two thirds of the capacity must reach."""
        if not self.auto.request_rate and max(self.load.rates) < inf:
            return max(self.load.rates)
        asked = None if self.auto.num_requests else self.load.num_requests
        return (asked or NUM_SAMPLED) / self.seconds

    def best(self) -> tuple[BenchLoadConfig, float | None]:
        """Double the length scale while all requests fit and the rate is reached.

        Return that load and its capacity.
        """
        scale = SMALLEST_SCALE
        best = self.at(float(scale))
        while scale < 1 and self._fits(self._sample(float(scale * 2))):
            scale *= 2
            load, capacity = self.at(float(scale))
            assert capacity is not None
            if LOAD_SHARE * capacity < self.least_rate or not self._all_fit(load):
                break
            best = load, capacity
        return best

    def at(
        self, length_scale: float, capacity_of: Capacity | None = None
    ) -> tuple[BenchLoadConfig, float | None]:
        """Return the load at a scale and, if anything depends on it, the capacity there."""
        load, capacity = replace(self.load, length_scale=length_scale), None
        if self.auto.length_scale or self.auto.request_rate:
            shapes = [request.shape for request in self._sample(length_scale)]
            capacity = (capacity_of or self.served.capacity)(shapes)
        if self.auto.request_rate:
            assert capacity is not None
            load = replace(load, rates=(rounded_down(LOAD_SHARE * capacity),))
        if self.auto.num_requests:
            number = DEFAULT_NUM_REQUESTS
            if self.auto.request_rate:
                number = round(max(load.rates) * self.seconds)
                number = min(max(number, FEWEST_REQUESTS), MOST_REQUESTS)
            load = replace(load, num_requests=len(self._sample(length_scale, number)))
        return load, capacity

    def words(self, load: BenchLoadConfig, capacity: float | None) -> str:
        """Return the line on the chosen values."""
        parts = []
        if self.auto.length_scale:
            parts.append(f"--length-scale {Fraction(load.length_scale)}, {self._why(load.length_scale)}")
        if self.auto.request_rate:
            parts.append(
                f"--request-rate {load.rates[0]:g}, two thirds of the {capacity:.2g} req/s that "
                f"{self.served.source} as capacity"
            )
        if self.auto.num_requests:
            why = f", in about {self.seconds:g} s" if self.auto.request_rate else ""
            parts.append(f"--num-requests {load.num_requests}{why}")
        return f"Chosen: {'; '.join(parts)}. Give these flags to choose otherwise."

    def _why(self, length_scale: float) -> str:
        if length_scale == SMALLEST_SCALE:
            return "the smallest that is chosen"
        assumed = "" if self.served.max_tokens else " (assumed: the server does not say what it takes)"
        return (
            f"the largest power of two by which all requests fit {self.max_tokens:,} tokens{assumed} and "
            f"{self.least_rate:.3g} req/s are at most two thirds of the capacity"
        )

    def _sample(self, length_scale: float, number: int = NUM_SAMPLED) -> list[WorkloadRequest]:
        """Return the first requests that would be sent, fewer if a file has no more."""
        load = self.load
        endless = endless_workload(load.workload, seed=load.seed, request_rate=1.0, length_scale=length_scale)
        return list(islice(endless, number))

    def _all_fit(self, load: BenchLoadConfig) -> bool:
        repeats = range(self.num_repeats)
        return all(self._fits(load.requests(max(load.rates), repeat)) for repeat in repeats)

    def _fits(self, requests: Sequence[WorkloadRequest]) -> bool:
        return longest_of(requests) <= self.max_tokens
