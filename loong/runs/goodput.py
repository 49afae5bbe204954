"""Goodput: the highest rate at which enough requests meet their SLO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from typing import Generic, Protocol, TypeVar

from loong.workloads.metrics.slo import SLORule

MAX_DOUBLINGS = 12  # from the first rate, up or down: beyond, the rate decides nothing


class Attempt(Protocol):
    """A run at a rate, which attains or not."""

    @property
    def rate(self) -> float:
        """Return the requests per second."""

    @property
    def attains(self) -> bool:
        """Return whether enough requests met their SLO."""


A = TypeVar("A", bound=Attempt)


@dataclass(frozen=True, slots=True)
class Goodput(Generic[A]):
    """Of one policy under one rule: the best attempt that attains (None if none does), and all by rate.

    It is between `rate` and `too_high_rate`: as close as was asked for, unless either end was not found.
    """

    policy: str
    rule: SLORule
    best: A | None
    points: tuple[A, ...]

    @property
    def rate(self) -> float:
        """Return the requests per second."""
        return 0.0 if self.best is None else self.best.rate

    @property
    def too_high_rate(self) -> float | None:
        """Return the lowest rate above it that was tried, which does not attain; None if all attain."""
        return min((p.rate for p in self.points if p.rate > self.rate), default=None)


def search(
    policy: str, rule: SLORule, attempt: Callable[[float], A], first_rate: float, precision: float
) -> Goodput[A]:
    """Double or halve the rate until the goodput is between two, then bisect, on a logarithmic scale.

    After `MAX_DOUBLINGS` the goodput is reported as at least, or below, the last rate.
    """
    points: dict[float, A] = {}

    def attains(rate: float) -> bool:
        points[rate] = attempt(rate)
        return points[rate].attains

    low = high = first_rate
    if attains(low):
        while len(points) <= MAX_DOUBLINGS and attains(high := low * 2):
            low = high
    else:
        while len(points) <= MAX_DOUBLINGS and not attains(low := high / 2):
            high = low
    if not points[low].attains:
        return Goodput(policy, rule, None, _by_rate(points))
    while high > low * (1 + precision):
        middle = sqrt(low * high)
        if attains(middle):
            low = middle
        else:
            high = middle
    return Goodput(policy, rule, points[low], _by_rate(points))


def of_sweep(policy: str, rule: SLORule, points: Sequence[A]) -> Goodput[A]:
    """Return the highest rate up to which all attain, of attempts in the order of their rates."""
    attained = list(takewhile(lambda point: point.attains, points))
    return Goodput(policy, rule, attained[-1] if attained else None, tuple(points))


def _by_rate(points: Mapping[float, A]) -> tuple[A, ...]:
    return tuple(points[rate] for rate in sorted(points))
