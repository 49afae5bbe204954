"""Samples of every kind of work, from the stories that a profile tells."""

import asyncio
from collections.abc import Iterable
from functools import cache

from simulation import instances_with

from loong.core.events import Event
from loong.executor.simulated import SimulatedExecutor
from loong.launcher.profile.measure import Measured, Profiler
from loong.launcher.profile.stage import Stage
from loong.launcher.profile.stories import Limits
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduler.fit import Sample

NUM_INSTANCES = 4


def told_stories(
    clock: WorkCostModel,
    seed: int,
    prior: WorkCostModel | None = None,
    kv_capacity: int = 8192,
    num_instances: int = NUM_INSTANCES,
    incidents: Iterable[Event] = (),
) -> list[Measured]:
    """One story of each kind and DoP on a simulated cluster."""
    executor = SimulatedExecutor(clock, [], incidents)
    stage = Stage(instances_with([kv_capacity] * num_instances), executor)

    async def pause(seconds: float) -> None:
        executor.pause(seconds)

    profiler = Profiler(stage, Limits(), prior or WorkCostModel(), seed=seed, pause=pause)
    return asyncio.run(profiler.measure(duration=0, on_progress=lambda seconds: None))


@cache
def told_samples(seed: int) -> tuple[Sample, ...]:
    """The samples of several rounds of stories; their seconds mean nothing."""
    rounds = (told_stories(WorkCostModel(), 10 * seed + number) for number in range(2))
    return tuple(measured.sample for stories in rounds for measured in stories)
