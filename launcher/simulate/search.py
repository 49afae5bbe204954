"""P90 goodput: the highest rate at which nine in ten requests meet their SLO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import sqrt

from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.parallel import in_order
from loong.launcher.simulate.points import Point, PointResult, run_point
from loong.workloads.slo import SLORule

NUM_SAMPLED = 300  # requests, for a first guess
MAX_DOUBLINGS = 12  # from the first rate, up or down: beyond, the rate decides nothing


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one policy under one rule: the best run that attains (None if none does), and all runs by rate.

    It is between `rate` and `too_high_rate`: as close as was asked for, unless either end was not found.
    """

    policy: str
    rule: SLORule
    best: PointResult | None
    points: tuple[PointResult, ...]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return 0.0 if self.best is None else self.best.point.rate

    @property
    def too_high_rate(self) -> float | None:
        """The lowest simulated rate above it, which does not attain; None if all attain."""
        return min((p.point.rate for p in self.points if p.point.rate > self.rate), default=None)


def search_all(config: SimulateConfig, precision: float) -> list[Goodput]:
    """The goodput of every policy under every rule."""
    tasks = [(policy, rule) for rule in config.rules for policy in config.policies]
    return in_order(partial(_search_task, config, precision), tasks, config.num_jobs, "search")


def search(config: SimulateConfig, policy: str, rule: SLORule, precision: float) -> Goodput:
    """Double or halve the rate until the goodput is between two, then bisect, on a logarithmic scale.

    The first rate is the highest of `config.rates`, or else a guess. After `MAX_DOUBLINGS` the goodput is
    told as at least, or below, the last rate.
    """
    points: dict[float, PointResult] = {}

    def attains(rate: float) -> bool:
        points[rate] = run_point(config, Point(policy, rule, rate), cuts_off=True)
        return points[rate].attains

    low = high = max(config.rates, default=guess(config))
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


def goodputs_of_sweep(config: SimulateConfig, results: Sequence[PointResult]) -> list[Goodput]:
    """The highest simulated rate up to which all attain, of every policy under every rule."""
    goodputs = []
    for rule in config.rules:
        for policy in config.policies:
            points = tuple(r for r in results if (r.point.policy, r.point.rule) == (policy, rule))
            attained = list(takewhile(lambda result: result.attains, points))
            goodputs.append(Goodput(policy, rule, attained[-1] if attained else None, points))
    return goodputs


def guess(config: SimulateConfig) -> float:
    """Half of the rate at which all instances together would do nothing but prefill, each at its quickest."""
    prefill_time = config.hardware.unloaded_prefill()
    load = replace(config.load, num_requests=NUM_SAMPLED)
    seconds = sum(prefill_time(request.num_prompt_tokens) for request in load.at(1.0).measured)
    return float(f"{NUM_SAMPLED / seconds / 2:.2g}")


def _by_rate(points: Mapping[float, PointResult]) -> tuple[PointResult, ...]:
    return tuple(points[rate] for rate in sorted(points))


def _search_task(config: SimulateConfig, precision: float, task: tuple[str, SLORule]) -> Goodput:
    return search(config, *task, precision)
