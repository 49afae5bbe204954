"""Samples of every kind of work, from the scenarios of a profile."""

import asyncio
from collections.abc import Iterable
from functools import cache

from simulation import instances_with

from loong.core.events import Event
from loong.executor.simulated import SimulatedExecutor
from loong.profiling.measure import Measured, Profiler
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.scenarios import Limits
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.fit import Sample

NUM_INSTANCES = 4


def measured_scenarios(
    clock: WorkCostModel,
    seed: int,
    prior: WorkCostModel | None = None,
    kv_capacity: int = 8192,
    num_instances: int = NUM_INSTANCES,
    incidents: Iterable[Event] = (),
) -> list[Measured]:
    """Return one story of each kind and DoP on a simulated cluster."""
    executor = SimulatedExecutor(clock, [], incidents)
    cluster = ProfiledCluster(instances_with([kv_capacity] * num_instances), executor, clock.host.idle)

    async def pause(seconds: float) -> None:
        executor.pause(seconds)

    profiler = Profiler(cluster, Limits(), prior or WorkCostModel(), seed=seed, pause=pause)
    return asyncio.run(profiler.measure(duration=0, on_progress=lambda seconds: None))


@cache
def profile_samples(seed: int) -> tuple[Sample, ...]:
    """Return the samples of several rounds of scenarios; their seconds mean nothing."""
    rounds = (measured_scenarios(WorkCostModel(), 10 * seed + number) for number in range(2))
    return tuple(measured.sample for scenarios in rounds for measured in scenarios)
