"""Engines borrow what their requests need to be admitted, and lend what they can spare; no loan fails one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import decoding, snapshot_of, waiting

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.snapshot import Snapshot
from loong.engine.room_need import (
    KEPT_SHARE,
    LEAST_LOAN,
    bound_ids,
    is_needless,
    lacking_tokens,
    most_loan,
    reclaimed_tokens,
    room_need,
    room_to_lend,
)
from loong.lending.engine_room import RoomNeed
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy


def with_loan(snapshot: Snapshot, kv_capacity: int, kv_used: int = 0) -> Snapshot:
    """Return the snapshot with borrowed room as instance 9."""
    loan = ElasticInstance(9, 1, InstanceKind.ATTENTION, kv_capacity, kv_used)
    return replace(snapshot, instances=(*snapshot.instances, loan))


def test_an_engine_lacks_what_its_requests_need_to_be_admitted() -> None:
    """Both grow to their declared ends: 2 x (100 + 99) tokens."""
    snapshot = snapshot_of([300], [waiting("a", 100, 100), decoding("b", 100, (0,), 100)])
    assert lacking_tokens(snapshot) == pytest.approx(98, abs=2)
    assert lacking_tokens(with_loan(snapshot, 50)) == lacking_tokens(snapshot) - 50
    assert room_need(snapshot) == RoomNeed(112, LEAST_LOAN)
    assert room_need(snapshot, num_coming=100) is None


def test_one_loan_must_do_for_a_request_that_does_not_fit_alone() -> None:
    views = [waiting("a", 500, 31, arrival_time=2.0), waiting("b", 300, 11, arrival_time=1.0)]
    snapshot = replace(snapshot_of([200], views), now=5.0)
    assert room_need(snapshot) == RoomNeed(112, 112, 4.0)
    assert room_need(with_loan(snapshot, 112)) == RoomNeed(336, 336, 3.0)


def test_a_loan_is_no_small_one() -> None:
    need = room_need(snapshot_of([400, 400], [waiting("a", 400, 2), waiting("b", 402, 2)]))
    assert need == RoomNeed(208, 112)


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=3),
    st.lists(st.integers(1, 700), max_size=4),
    st.integers(1, 4000),
    st.integers(0, 1000),
)
def test_what_is_lent_leaves_a_share_of_the_pool_and_what_requests_need(
    pools: list[int], prompts: list[int], num_wanted: int, least: int
) -> None:
    snapshot = snapshot_of(pools, [waiting(f"r{i}", n) for i, n in enumerate(prompts)])
    need = RoomNeed(num_wanted, least)
    found = room_to_lend(snapshot, need)
    if found is None:
        return
    instance_id, num_tokens = found
    assert max(least, LEAST_LOAN) <= num_tokens <= min(num_wanted, most_loan(pools[instance_id]))
    assert snapshot.free[instance_id] - num_tokens >= round(KEPT_SHARE * pools[instance_id])
    assert sum(snapshot.free.values()) - num_tokens >= sum(v.num_final_tokens for v in snapshot.waiting)
    assert room_to_lend(with_loan(snapshot, 100), need) in (found, None)


def test_an_idle_engine_lends_enough_for_the_longest_request_that_is_taken() -> None:
    for pool in (200, 1000, 4096):
        need = room_need(snapshot_of([pool], [waiting("a", pool + most_loan(pool) - 15, 16)]))
        assert need is not None
        assert room_to_lend(snapshot_of([pool], []), need) == (0, most_loan(pool))


def test_of_two_engines_that_need_each_others_room_the_one_that_has_waited_longer_gets_it() -> None:
    snapshots = [
        replace(snapshot_of([400], [waiting("a", 500, arrival_time=t)]), now=9.0) for t in (1.0, 2.0)
    ]
    needs = [room_need(snapshot) for snapshot in snapshots]
    assert needs[0] is not None
    assert needs[1] is not None
    assert room_to_lend(snapshots[0], needs[1]) is None
    assert room_to_lend(snapshots[1], needs[0]) is not None
    assert room_to_lend(snapshots[1], replace(needs[0], waited=None)) is None
    assert reclaimed_tokens(replace(snapshots[1], lent={0: 10})) == 10


def test_a_loan_is_needless_once_its_kv_and_more_fit_at_home() -> None:
    free = snapshot_of([400])
    assert is_needless(with_loan(free, 200, 200), 9)
    assert not is_needless(with_loan(free, 500, 401), 9)
    assert not is_needless(with_loan(snapshot_of([400], [waiting("a", 300)]), 200, 0), 9)


def test_a_request_with_kv_is_bound_to_the_loan_that_it_needs() -> None:
    snapshot = with_loan(snapshot_of([300], [decoding("a", 250, (0,), 100), decoding("b", 20, (0,), 9)]), 100)
    assert bound_ids(snapshot, 9) == {"a"}
    assert bound_ids(snapshot, 8) == frozenset()


def test_a_request_that_fits_only_without_loans_waits_for_the_room_to_return() -> None:
    snapshot = replace(snapshot_of([300], [waiting("a", 350)]), lent={0: 200})
    assert reclaimed_tokens(snapshot) == lacking_tokens(snapshot)
    policy = make_policy("esp", PolicyConfig())
    plan = policy(snapshot, WorkCostModel())
    assert not plan.failures
    assert not plan.batches
    assert policy(replace(snapshot, lent={}), WorkCostModel()).failures


def test_a_request_that_only_a_loan_has_room_for_waits_and_keeps_no_slots_from_others() -> None:
    policy = make_policy("esp", PolicyConfig(max_loan=200))
    long, short = decoding("a", 250, (0,), 200), waiting("b", 100)
    assert policy(snapshot_of([300], [waiting("c", 500)]), WorkCostModel()).failures
    alone = policy(snapshot_of([300], [long]), WorkCostModel())
    assert not alone.failures
    assert not alone.batches
    assert [p.request_id for p in policy(snapshot_of([300], [long, short]), WorkCostModel()).preemptions] == [
        "a"
    ]
    assert policy(with_loan(snapshot_of([300], [long, short]), 200), WorkCostModel()).batches
