"""Backlog: the work that has arrived and is not finished, and the capacity that a run used."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeAlias

from loong.workloads.metrics.record import RequestRecord
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import WorkloadRequest

NUM_SAMPLES = 65  # of a backlog over time, both ends included
MIN_REQUESTS = 40  # with fewer, one request decides whether the backlog grows
GROWTH = 0.05  # of the work that arrives in the second half; smaller growth counts as noise

WorkOf: TypeAlias = Callable[[WorkloadRequest], float]
"""Device seconds of a request that has one instance to itself; an instance may have several devices."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Device seconds of the requests that have arrived and are not finished, at evenly spaced `times`.

    `at_half` is its value when half of the requests have arrived, `at_end` when all have. `allowance` is the
    growth that counts as stable: the larger of the largest request and `GROWTH` of the second half's work,
    and the part of `at_end` that is still in time. Values that lie after the end of the run are None.
    """

    times: tuple[float, ...]
    device_seconds: tuple[float, ...]
    at_half: float | None
    at_end: float | None
    allowance: float

    @property
    def is_stable(self) -> bool | None:
        """Return whether the backlog does not grow; None if the requests are too few, or came all at once."""
        if self.at_half is None or self.at_end is None:
            return None
        return self.at_end <= self.at_half + self.allowance


@dataclass(frozen=True, slots=True)
class UsedCapacity:
    """The backlog of a run, and the share of its devices' time that completed requests used.

    The share is None if the number of devices is not known.
    """

    backlog: Backlog
    share: float | None


def backlog_of(
    arrivals: Sequence[float],
    finishes: Sequence[float],
    works: Sequence[float],
    end: float,
    deadlines: Sequence[float] = (),
) -> Backlog:
    """Return the backlog of requests in order of arrival, until `end`.

    A request that never finishes has the time inf.

    A request that has not ended is in time up to its deadline, if there are any.
    """
    arrived = list(accumulate(works, initial=0.0))
    order = sorted(range(len(works)), key=lambda index: finishes[index])
    ends = [finishes[index] for index in order]
    finished = list(accumulate((works[index] for index in order), initial=0.0))

    def at(time: float) -> float:
        return max(0.0, arrived[bisect_right(arrivals, time)] - finished[bisect_right(ends, time)])

    times = tuple(end * number / (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    is_judged = len(works) >= MIN_REQUESTS and arrivals[-1] > arrivals[0]
    half, last = len(works) // 2, arrivals[-1] if arrivals else 0.0
    later = arrived[-1] - arrived[half]
    pending = zip(finishes, works, deadlines, strict=False)
    in_time = sum(work for finish, work, deadline in pending if finish > last and deadline >= last)
    return Backlog(
        times,
        tuple(map(at, times)),
        at(arrivals[half - 1]) if is_judged and arrivals[half - 1] <= end else None,
        at(last) if is_judged and last <= end else None,
        max(GROWTH * later, max(works, default=0.0)) + in_time,
    )


def used_capacity(
    records: Iterable[RequestRecord],
    work_of: WorkOf,
    end: float,
    num_devices: int | None,
    limits_of: LimitsOf | None = None,
) -> UsedCapacity:
    """Return the backlog and the share in use of a run that ended at `end`."""
    ordered = sorted(records, key=lambda record: record.due_time)
    works = [work_of(record.request) for record in ordered]
    finishes = [record.finish_time if record.has_ended else inf for record in ordered]
    served = sum(work for record, work in zip(ordered, works, strict=True) if record.is_completed)
    share = served / (num_devices * end) if num_devices and end > 0 else None
    deadlines = () if limits_of is None else [_deadline(record, limits_of) for record in ordered]
    arrivals = [record.due_time for record in ordered]
    return UsedCapacity(backlog_of(arrivals, finishes, works, end, deadlines), share)


def deadline_of(arrival_time: float, ttft: float, tpot: float, num_output_tokens: int) -> float:
    """Return the time by which a request must end if its tokens are just in time.

    It is the arrival time if either bound is infinite.
    """
    deadline = arrival_time + ttft + (tpot * (num_output_tokens - 1) if num_output_tokens > 1 else 0.0)
    return deadline if deadline < inf else -inf


def _deadline(record: RequestRecord, limits_of: LimitsOf) -> float:
    limits = limits_of(record.request.num_prompt_tokens)
    return deadline_of(record.due_time, limits.ttft, limits.tpot, record.request.num_output_tokens)
