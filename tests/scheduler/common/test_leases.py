"""Leases and their masters, and who gives way where slots lack."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from machines import CPU
from plans import decode
from snapshots import decoding, running

from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.plan import LeaseEnd
from loong.core.request import RequestView
from loong.scheduler.common.leases import latest_in_the_way, lease_ends, plan_lease
from loong.scheduler.common.masters import choose_masters, no_instances

VIEWS = [decoding(f"r{n}", 6, (n % 2,), max_tokens=30) for n in range(6)]


def spread_masters(free: dict[InstanceId, int], views: list[RequestView]) -> list[InstanceId]:
    """Return the masters of leases of 16 steps where no instance is preferred."""
    masters = choose_masters(views, free, 16, no_instances)
    assert masters is not None
    return [master_id for _, master_id in masters]


def test_masters_are_spread_evenly_over_all_instances_wherever_the_kv_is() -> None:
    assert Counter(spread_masters({0: 99, 1: 99, 2: 99}, VIEWS)) == {0: 2, 1: 2, 2: 2}


def test_a_request_keeps_the_master_of_its_newest_kv() -> None:
    assert spread_masters({0: 99, 1: 99}, VIEWS) == [0, 1, 0, 1, 0, 1]


def test_a_master_without_room_is_passed_over() -> None:
    assert spread_masters({0: 3, 1: 50}, VIEWS[:1]) == [1]
    assert choose_masters(VIEWS[:1], {0: 3, 1: 5}, 16, no_instances) is None


def test_a_lease_is_as_long_as_there_is_room_for() -> None:
    for num_free, num_steps in ((100, 16), (50, 8), (6, 1)):
        lease = plan_lease({0: num_free, 1: 0}, VIEWS, CPU, 16)
        assert lease is not None
        assert lease.num_steps == num_steps
        assert lease.group.instance_ids == (0, 1)
        assert lease.num_stored_tokens == {0: 6 * num_steps}
    assert plan_lease({0: 3, 1: 2}, VIEWS, CPU, 16) is None


def test_a_lease_is_no_longer_than_its_longest_request() -> None:
    views = [decoding("a", 6, (0,), max_tokens=4), decoding("b", 6, (0,), max_tokens=9)]
    lease = plan_lease({0: 100}, views, CPU, 16)
    assert lease is not None
    assert lease.num_steps == 8
    assert tokens_by_instance(lease.writes_of("a")) == {0: 3}


def test_only_leases_with_a_step_to_spare_are_ended() -> None:
    single = running(1, decode(VIEWS[:1], [0], {"r0": 0}))
    lease = decode(VIEWS[1:2], [1], {"r1": 1}, num_steps=4)
    batches = [single, *(running(2 + taken, lease, num_steps_taken=taken) for taken in range(4))]
    assert lease_ends(batches) == (LeaseEnd(2, 1), LeaseEnd(3, 2), LeaseEnd(4, 3))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 12))
def test_the_latest_give_way_until_the_others_have_a_slot_each(lengths: list[int], num_free: int) -> None:
    views = [arriving(number, length) for number, length in enumerate(lengths)]
    leaving = latest_in_the_way(views, num_free)
    staying = views[: len(views) - len(leaving)]
    assert leaving == views[: len(staying) - 1 : -1]
    assert staying
    assert len(staying) == 1 or num_free + sum(v.num_computed_tokens for v in leaving) >= len(staying)
    if leaving:
        num_kept_free = num_free + sum(v.num_computed_tokens for v in leaving[:-1])
        assert num_kept_free < len(staying) + 1


def arriving(number: int, num_tokens: int) -> RequestView:
    return decoding(f"r{number}", num_tokens, (0,))
