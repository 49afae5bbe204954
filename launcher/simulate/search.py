"""Goodput in virtual time: searched for, or read off a sweep."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from loong.launcher import goodput
from loong.launcher.goodput import Goodput
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.parallel import in_order
from loong.launcher.simulate.points import PointResult, asked_of, run_point
from loong.workloads.slo import SLORule

NUM_SAMPLED = 300  # requests, for a first guess


def search_all(config: SimulateConfig, precision: float) -> list[Goodput[PointResult]]:
    """The goodput of every policy under every rule."""
    tasks = [(policy, rule) for rule in config.rules for policy in config.policies]
    return in_order(partial(_search_task, config, precision), tasks, config.num_jobs)


def search(config: SimulateConfig, policy: str, rule: SLORule, precision: float) -> Goodput[PointResult]:
    """The goodput of one policy, every rate told when it was tried; the first is the highest of
    `config.rates`, or else a guess.
    """

    def attempt(rate: float) -> PointResult:
        return run_point(config, asked_of(config, policy, rule, rate), cuts_off=True, is_told=True)

    first_rate = max(config.rates, default=guess(config))
    return goodput.search(policy, rule, attempt, first_rate, precision)


def goodputs_of_sweep(config: SimulateConfig, results: Sequence[PointResult]) -> list[Goodput[PointResult]]:
    """The highest simulated rate up to which all attain, of every policy under every rule."""
    return [
        goodput.of_sweep(
            policy, rule, [r for r in results if (r.asked.policy, r.asked.rule) == (policy, rule)]
        )
        for rule in config.rules
        for policy in config.policies
    ]


def guess(config: SimulateConfig) -> float:
    """Half of the rate at which all instances together would do nothing but prefill, each at its quickest."""
    prefill_time = config.hardware.unloaded_prefill()
    load = replace(config.load, num_requests=NUM_SAMPLED)
    seconds = sum(prefill_time(request.num_prompt_tokens) for request in load.at(1.0).measured)
    return float(f"{NUM_SAMPLED / seconds / 2:.2g}")


def _search_task(config: SimulateConfig, precision: float, task: tuple[str, SLORule]) -> Goodput[PointResult]:
    return search(config, *task, precision)
