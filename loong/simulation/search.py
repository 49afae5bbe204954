"""Goodput in virtual time: searched for, or read off a sweep."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from loong.runs import goodput
from loong.runs.goodput import Goodput
from loong.simulation.capacity import NUM_SAMPLED, POLICY, predicted_capacity, rounded_down
from loong.simulation.config import SimulateConfig
from loong.simulation.parallel import in_order
from loong.simulation.points import PointResult, asked_of, run_point
from loong.workloads.metrics.slo import SLORule


def search_all(
    config: SimulateConfig,
    precision: float,
    on_result: Callable[[Goodput[PointResult]], None] | None = None,
) -> list[Goodput[PointResult]]:
    """Return the goodput of every policy under every rule; `on_result` has each as soon as it is found."""
    task = partial(_search_task, config, precision)
    return in_order(task, all_searches(config), config.num_jobs, on_result)


def all_searches(config: SimulateConfig) -> list[tuple[str, SLORule]]:
    """Return what goodputs are searched for: each policy under each rule."""
    return [(policy, rule) for rule in config.rules for policy in config.policies]


def search(config: SimulateConfig, policy: str, rule: SLORule, precision: float) -> Goodput[PointResult]:
    """Return the goodput of one policy, and print a line for every rate that is tried.

    The first rate is the highest of `config.rates`, or else a guess.
    """

    def attempt(rate: float) -> PointResult:
        return run_point(config, asked_of(config, policy, rule, rate), cuts_off=True, is_reported=True)

    first_rate = max(config.rates) if config.rates else guess(config)
    return goodput.search(policy, rule, attempt, first_rate, precision)


def goodputs_of_sweep(config: SimulateConfig, results: Sequence[PointResult]) -> list[Goodput[PointResult]]:
    """Return the highest simulated rate up to which all attain, of every policy under every rule."""
    return [
        goodput.of_sweep(
            policy, rule, [r for r in results if (r.asked.policy, r.asked.rule) == (policy, rule)]
        )
        for rule in config.rules
        for policy in config.policies
    ]


def guess(config: SimulateConfig) -> float:
    """Return half of the predicted capacity, with two digits."""
    return rounded_down(capacity_of(config) / 2)


def capacity_of(config: SimulateConfig) -> float:
    """Return the requests per second that the hardware is predicted to complete.

    Layers with a window count as if they had room for all tokens that others have.
    """
    load = replace(config.load, num_requests=NUM_SAMPLED)
    shapes = [request.shape for request in load.at(1.0).measured]
    cluster = replace(config.hardware.cluster(POLICY), windows=None)
    return predicted_capacity(cluster, shapes, config.host, keeps_prefixes=config.keeps_prefixes)


def _search_task(config: SimulateConfig, precision: float, task: tuple[str, SLORule]) -> Goodput[PointResult]:
    return search(config, *task, precision)
