"""A profile finds what readers wait for holders that compute, and what these lose."""

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
from loong.profiling.served_runs import measured_lane
from loong.scheduler.cost.cost_model import ServiceLane
from loong.scheduler.cost.roofline import roofline

CLOCK = roofline(shape_of(CONFIG), DEVICES["cpu"])
CHUNK = 2048


def lane_of(
    clock_delay: float,
    loss: float = 0.0,
    kv_capacity: int = 40_000,
    num_instances: int = 3,
    serves: Service = Service.ALL,
) -> ServiceLane | None:
    """Return the lane that is measured on a simulated cluster with this delay and loss."""
    clock = replace(CLOCK, lane=ServiceLane(clock_delay, loss))
    executor = SimulatedExecutor(clock, [])
    instances = instances_with([kv_capacity] * num_instances, serves)
    cluster = ProfiledCluster(instances, executor, clock.host.idle)
    return asyncio.run(measured_lane(cluster, CHUNK, CLOCK))


@pytest.mark.parametrize("serves", [Service.ALL, Service.OWN_HOST])
@pytest.mark.parametrize("num_instances", [2, 3])
@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_the_delay_of_the_clock_is_found(delay: float, num_instances: int, serves: Service) -> None:
    lane = lane_of(delay, num_instances=num_instances, serves=serves)
    assert lane is not None
    assert lane.delay == pytest.approx(delay, abs=1e-4)  # later steps read more KV


@pytest.mark.parametrize("num_instances", [2, 3])
@pytest.mark.parametrize("loss", [0.0, 0.001])
def test_so_is_what_its_batches_lose(loss: float, num_instances: int) -> None:
    lane = lane_of(0.003, loss, num_instances=num_instances)
    assert lane is not None
    assert lane.loss == pytest.approx(loss, abs=2e-4)


def test_nothing_is_found_where_nobody_serves_or_there_is_no_room() -> None:
    assert lane_of(0.003, serves=Service.NONE) is None
    assert lane_of(0.003, num_instances=1) is None
    assert lane_of(0.003, kv_capacity=1024) is None
