"""KV on memory instances that are to leave goes in pieces, while decodes read it."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU
from policy_machine import PolicyMachine
from snapshots import decoding, running, snapshot_of

from loong.core.check_plan import check_plan
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, QueryBlock, Transfer
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common import moving_kv
from loong.scheduler.common.leaving_memory import LeavingMemory
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

POOL, PIECE, MEMORY_ID = 100, 8, 1


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving_kv, "LEAST_PIECE", PIECE)
        patch.setattr(moving_kv, "PIECE_SECONDS", 0.0)
        yield


def leaving(views: list[RequestView], *, is_leased: bool = True, pool: int = POOL) -> Snapshot:
    """Return instance 0, which may decode these with one lease, and a memory instance that is to leave."""
    batches = [running(7, lease(views), num_steps_taken=2)] if is_leased else []
    batches = [replace(batch, holder_ids=(MEMORY_ID,)) for batch in batches]
    snapshot = snapshot_of([pool, POOL], views, batches)
    memory = replace(snapshot.instances[1], kind=InstanceKind.ATTENTION, is_draining=True)
    return replace(snapshot, instances=(snapshot.instances[0], memory))


def lease(views: list[RequestView]) -> BatchPlan:
    firsts = [(view.request_id, view.num_computed_tokens) for view in views]
    return BatchPlan(
        ESPGroup((0,)),
        tuple(QueryBlock(name, range(first, first + 1), 0, Transfer.QUERY) for name, first in firsts),
        tuple(KVSegment(name, range(first, first + 8), 0) for name, first in firsts),
        8,
        predicted_time=0.01,
    )


def planned(snapshot: Snapshot) -> IterationPlan:
    plan = make_policy("esp", PolicyConfig())(snapshot, CPU)
    check_plan(snapshot, plan)
    return plan


def test_one_piece_moves_while_a_lease_goes_on() -> None:
    views = [decoding("a", 30, (0, MEMORY_ID)), decoding("b", 20, (MEMORY_ID,))]
    plan = planned(leaving(views))
    assert (plan.lease_ends, plan.evictions) == ((), ())
    (move,) = plan.migrations
    assert (move.link, len(move.segment.positions)) == ((MEMORY_ID, 0), PIECE)


def test_the_lease_ends_when_the_piece_has_arrived_and_the_next_follows() -> None:
    snapshot = leaving([decoding("b", 20, (MEMORY_ID,))])
    (move,) = planned(snapshot).migrations
    on_way = replace(snapshot.running[0], is_migrating=True)
    moving = replace(snapshot, running=(on_way,), migrations=(move,))
    assert planned(moving) == IterationPlan()
    arrived = replace(snapshot, running=(on_way,))
    assert planned(arrived).lease_ends == (LeaseEnd(7, 3),)


def test_a_request_at_rest_waits_for_no_more_than_a_piece() -> None:
    plan = planned(leaving([decoding("b", 20, (MEMORY_ID,))], is_leased=False))
    (batch,) = plan.batches
    assert batch.group.instance_ids == (0,)
    assert [len(move.segment.positions) for move in plan.migrations] == [PIECE]


def test_kv_without_room_elsewhere_stops_and_is_evicted_as_that_of_any_instance() -> None:
    views = [decoding("a", 40, (0,), max_tokens=9), decoding("b", 40, (MEMORY_ID,), max_tokens=9)]
    assert LeavingMemory.of(leaving(views, pool=60)) is None
    plan = planned(leaving(views, is_leased=False, pool=60))
    assert {move.segment.instance_id for move in plan.migrations} <= {MEMORY_ID}
    assert {eviction.segment.instance_id for eviction in plan.evictions} == {MEMORY_ID}


def test_the_room_of_what_is_to_come_is_taken() -> None:
    found = LeavingMemory.of(leaving([decoding("b", 30, (MEMORY_ID,))]))
    assert found is not None
    own, memory = found.shown.instances
    assert own.kv_free == POOL - 8 - 30
    assert memory.kv_free == 0
    assert not memory.is_draining


class Watched(PolicyMachine):
    """A cluster whose memory instances come and go, with at most a piece on its way from one that leaves."""

    def commit(self, plan: IterationPlan) -> None:
        before = self.view()
        super().commit(plan)
        if before.draining_ids and LeavingMemory.of(before) is not None:
            new = [m for m in plan.migrations if m.segment.instance_id in before.draining_ids]
            self.check_pieces(new, [*before.migrations, *new])

    def check_pieces(self, new: list[KVMigration], on_way: list[KVMigration]) -> None:
        for source_id in {m.segment.instance_id for m in new}:
            from_it = [m for m in on_way if m.segment.instance_id == source_id]
            assert sum(len(m.segment.positions) for m in from_it) <= PIECE, from_it


@examples(8, thorough=40)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_pieces_are_small_and_memory_instances_become_empty(seed: int) -> None:
    machine, random = Watched("esp", memory=(48, 48)), Random(seed)
    machine.start()
    for _ in range(120):
        machine.moment(random)
    machine.teardown()
