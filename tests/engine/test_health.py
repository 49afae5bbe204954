"""An engine is ok with all its instances, degraded without some, and dead without any."""

from dataclasses import replace

import pytest

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.snapshot import Snapshot
from loong.engine.health import HEALTHY_SILENCE_SECONDS, Health, HealthState, Trouble, health_of

SILENT = HEALTHY_SILENCE_SECONDS + 0.1


def cluster(*live_ids: int, returning: tuple[int, ...] = ()) -> Snapshot:
    instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100) for i in live_ids)
    return Snapshot(0.0, instances, returning=dict.fromkeys(returning, 100))


def test_all_instances_that_are_heard_from_are_ok() -> None:
    assert health_of(cluster(0, 1), {0: 0.0, 1: HEALTHY_SILENCE_SECONDS}) == Health()


@pytest.mark.parametrize(
    ("snapshot", "silences", "troubles"),
    [
        (cluster(0, returning=(1, 2)), {}, {1: Trouble.RESTARTING, 2: Trouble.RESTARTING}),
        (cluster(0, 1), {1: SILENT}, {1: Trouble.SILENT}),
        (cluster(0, 1, returning=(2,)), {0: SILENT}, {0: Trouble.SILENT, 2: Trouble.RESTARTING}),
    ],
)
def test_a_cluster_without_some_is_degraded_and_names_them(
    snapshot: Snapshot, silences: dict[int, float], troubles: dict[int, Trouble]
) -> None:
    health = health_of(snapshot, silences)
    assert (health.state, health.troubles) == (HealthState.DEGRADED, troubles)
    assert all(f"instance {i} " in health.message for i in troubles)
    assert health.is_alive


def test_an_instance_that_is_to_leave_does_no_harm_and_is_named() -> None:
    draining = replace(
        cluster(0, 1), instances=(*cluster(0).instances, replace(*cluster(1).instances, is_draining=True))
    )
    health = health_of(draining, {0: 0.0})
    assert (health.state, health.troubles) == (HealthState.OK, {1: Trouble.DRAINING})
    assert "instance 1 takes nothing new" in health.message
    assert health_of(draining, {0: SILENT}).state is HealthState.DEAD


@pytest.mark.parametrize(
    ("snapshot", "silences"),
    [
        (cluster(), {}),
        (cluster(returning=(0, 1)), {}),
        (cluster(0, 1), {0: SILENT, 1: SILENT}),
        (cluster(0, returning=(1,)), {0: SILENT}),
    ],
)
def test_a_cluster_in_which_none_serves_is_dead(snapshot: Snapshot, silences: dict[int, float]) -> None:
    health = health_of(snapshot, silences)
    assert health.state is HealthState.DEAD
    assert health.message
    assert not health.is_alive


def test_a_trouble_of_all_that_serve_on_is_named_and_degrades() -> None:
    health = health_of(cluster(0), {}, trouble="the run directory is gone")
    assert health == Health(HealthState.DEGRADED, "the run directory is gone")
    assert health_of(cluster(), {}, trouble="the run directory is gone").state is HealthState.DEAD


def test_quarantined_instances_are_named_beside_those_that_serve_or_make_it_dead() -> None:
    degraded = health_of(cluster(0), {}, {2})
    assert (degraded.state, degraded.troubles) == (HealthState.DEGRADED, {2: Trouble.QUARANTINED})
    assert "instance 2 is quarantined" in degraded.message
    assert health_of(cluster(), {}, {0, 1}).state is HealthState.DEAD
