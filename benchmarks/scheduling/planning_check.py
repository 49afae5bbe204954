"""Fails if a plan of `esp` takes too long for the machine, whatever else runs there.

Each plan of the scenario of `event.py` is made several times, by turns with a fixed computation. Both count
by their least processor time, and the median of their ratios may be at most a limit.
"""

import asyncio
import gc
import sys
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from statistics import median

from event import is_counted, measure, timed

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.processes.gc_tuning import tune_gc
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

LIMITS = {128: 12.0, 512: 28.0}  # by the number of requests, times the fixed computation
NUM_INSTANCES, NUM_PLANS, NUM_TURNS = 8, 160, 5


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    size: int


def fixed_computation() -> int:
    """Make, sort and group small objects, as policies do."""
    items = [_Item(f"r{number}", number * 37 % 101) for number in range(100)]
    by_size: dict[int, list[_Item]] = {}
    for item in sorted(items, key=attrgetter("size", "name")):
        by_size.setdefault(item.size % 8, []).append(item)
    return max(sum(item.size for item in group) for group in by_size.values())


def planning_ratio(policy: Policy, num_requests: int) -> float:
    """Return the time of a plan, as a multiple of the fixed computation's."""
    ratios: list[float] = []

    def timed_policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not is_counted(snapshot, num_requests):
            return policy(snapshot, cost_model)
        plan_seconds = fixed_seconds = inf
        for _ in range(NUM_TURNS):
            fixed_seconds = min(fixed_seconds, timed(fixed_computation)[1])
            unread = replace(snapshot)  # nothing is computed from it yet
            plan, seconds = timed(policy, unread, cost_model)
            plan_seconds = min(plan_seconds, seconds)
        ratios.append(plan_seconds / fixed_seconds)
        return plan

    asyncio.run(measure(timed_policy, num_requests, NUM_INSTANCES, NUM_PLANS))
    return median(ratios)


def main() -> int:
    policy = make_policy("esp", PolicyConfig())
    gc.collect()
    gc.freeze()  # this and the next as in `event.py`
    tune_gc()
    is_slow = False
    for num_requests, limit in LIMITS.items():
        ratio = planning_ratio(policy, num_requests)
        is_slow |= ratio > limit
        print(
            f"a plan at {num_requests} requests on {NUM_INSTANCES} instances takes {ratio:.1f} times "
            f"the fixed computation, at most {limit:g}: {'TOO SLOW' if ratio > limit else 'passed'}"
        )
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
