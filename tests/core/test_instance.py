import pytest

from loong.core.errors import InvalidPlanError
from loong.core.instance import (
    ElasticInstance,
    ESPGroup,
    InstanceKind,
    home_instance_id,
    host_tier_id,
    spread_over_hosts,
)
from loong.core.placement import KVSegment
from loong.core.plan import KVMigration


def test_a_group_without_instances_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="at least one"):
        ESPGroup(())


def test_a_group_that_names_an_instance_twice_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match=r"\(2, 0, 2\) names an instance twice"):
        ESPGroup((2, 0, 2))


def test_after_p_ring_steps_every_instance_has_met_every_block_once() -> None:
    group = ESPGroup((3, 1, 4, 0))
    assert group.dop == 4
    assert group.leader_id == 3
    for instance_id in group.instance_ids:
        met = [group.source_at(instance_id, step) for step in range(group.dop)]
        assert met[0] == instance_id
        assert sorted(met) == sorted(group.instance_ids)


def test_each_ring_step_hands_every_block_to_the_next_instance() -> None:
    group = ESPGroup((3, 1, 4))
    assert [group.source_at(instance_id, 1) for instance_id in (3, 1, 4)] == [4, 3, 1]


def test_an_instance_is_idle_unless_it_runs_a_batch_or_has_no_weights() -> None:
    assert ElasticInstance(0, 1, InstanceKind.FULL, 10).is_idle
    assert not ElasticInstance(0, 1, InstanceKind.ATTENTION, 10).is_idle
    assert not ElasticInstance(0, 1, InstanceKind.FULL, 10, batch_id=1).is_idle
    assert not ElasticInstance(0, 1, InstanceKind.HOST, 10).is_idle


def test_what_is_free_and_what_is_used_make_up_the_capacity() -> None:
    assert ElasticInstance(0, 1, InstanceKind.FULL, 10, kv_used=4).kv_free == 6


def test_a_migration_goes_somewhere_else() -> None:
    segment = KVSegment("r", range(0, 8, 2), 1)
    with pytest.raises(InvalidPlanError, match="already on instance 1"):
        KVMigration(segment, 1)
    assert KVMigration(segment, 2).arriving == KVSegment("r", range(0, 8, 2), 2)


def test_an_instance_is_home_to_itself_and_to_its_host_tier() -> None:
    for instance_id in range(3):
        for kept_id in (instance_id, host_tier_id(instance_id, 3)):
            assert home_instance_id(kept_id, 3) == instance_id
    assert [host_tier_id(i, 3) for i in range(3)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("num_instances", "num_hosts", "host_ids"),
    [(4, 1, (0, 0, 0, 0)), (4, 2, (0, 0, 1, 1)), (5, 2, (0, 0, 0, 1, 1)), (3, 3, (0, 1, 2))],
)
def test_instances_are_spread_evenly_and_neighbors_share_a_host(
    num_instances: int, num_hosts: int, host_ids: tuple[int, ...]
) -> None:
    assert spread_over_hosts(num_instances, num_hosts) == host_ids


def test_an_instance_stays_on_its_host() -> None:
    instance = ElasticInstance(1, 1, InstanceKind.FULL, 10, host_id=3)
    assert instance.using(5).running(7).host_id == 3
