"""A profile finds what readers of one instance lose to each other, and what they cost it."""

import asyncio
from dataclasses import replace

import pytest
from simulation import instances_with

from loong.core.instance import Service
from loong.executor.simulated import SimulatedExecutor
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.tiny import CONFIG
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.reader_runs import Readers, crowding_of, measured_readers
from loong.scheduler.cost.cost_model import ServiceLane
from loong.scheduler.cost.roofline import roofline

CLOCK = roofline(shape_of(CONFIG), DEVICES["cpu"])


def readers_of(
    crowding: float, num_instances: int, serves: Service = Service.ALL, kv_capacity: int = 40_000
) -> tuple[Readers, ...]:
    """Return what is measured on a simulated cluster whose readers hinder each other so much."""
    clock = replace(CLOCK, lane=ServiceLane(crowding=crowding))
    instances = instances_with([kv_capacity] * num_instances, serves)
    cluster = ProfiledCluster(instances, SimulatedExecutor(clock, []), clock.host.idle)
    return asyncio.run(measured_readers(cluster, 1024, CLOCK))


@pytest.mark.parametrize("crowding", [0.0, 1.0, 2.0])
def test_the_crowding_of_the_clock_is_found(crowding: float) -> None:
    readers = readers_of(crowding, 5)
    assert [found.num_readers for found in readers] == [1, 2, 4]
    assert crowding_of(readers) == pytest.approx(crowding, rel=0.1, abs=0.05)
    assert 0 < readers[0].lost < readers[1].lost < readers[2].lost < 1


def test_there_are_as_many_readers_as_instances_serve_and_have_room_for() -> None:
    assert [found.num_readers for found in readers_of(1.0, 9)] == [1, 2, 4, 8]
    assert [found.num_readers for found in readers_of(1.0, 9, Service.OWN_HOST)] == [1, 2, 4]
    assert len(readers_of(1.0, 3, kv_capacity=7_000)) == 1
    for none in (readers_of(1.0, 2, Service.NONE), readers_of(1.0, 1), readers_of(1.0, 2, kv_capacity=99)):
        assert crowding_of(none) is None is (none or None)
