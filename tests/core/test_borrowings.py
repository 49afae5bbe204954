"""Borrowings of a plan: their rules, and the snapshot after them."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import prefill
from snapshots import decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.errors import InvalidPlanError
from loong.core.placement import CachedKV, InstanceId, KVSegment, Placement
from loong.core.plan import Borrowing, IterationPlan, Preemption, PreemptionReason
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot

NUM_PROMPT = 20


def kv(
    first: int, stop: int, instance_id: InstanceId = 0, owner_id: str = "kv-1", step: int = 1
) -> KVSegment:
    return KVSegment(owner_id, range(first, stop, step), instance_id)


READ, UNREAD, ELSEWHERE = kv(0, 6), kv(6, 12), kv(12, 16, 1, "kv-2")
CACHED = (CachedKV(READ, is_read=True), CachedKV(UNREAD, is_read=False), CachedKV(ELSEWHERE, is_read=False))


def with_cached(request_id: str) -> RequestView:
    return replace(waiting(request_id, NUM_PROMPT, 4), cached=CACHED)


def snapshot(*request_ids: str) -> Snapshot:
    """Two instances, of which one caches 6 tokens that nobody reads and the other 4; r runs."""
    runs = decoding("r", 6, (0,))
    found = snapshot_of([40, 40], [*map(with_cached, request_ids), runs])
    instances = [replace(i, kv_cached=n) for i, n in zip(found.instances, (6, 4), strict=True)]
    return replace(found, instances=tuple(instances))


def plan_of(views: list[RequestView], *borrowings: Borrowing) -> IterationPlan:
    """Return a plan in which requests begin, those that borrow after what they borrow."""
    segments = {b.request_id: b.segments for b in borrowings}
    begun = [view.borrowing(segments.get(view.request_id, ())) for view in views]
    return IterationPlan((prefill(begun, (0, 1)),), borrowings=borrowings)


@pytest.mark.parametrize(
    ("borrowings", "message"),
    [
        ([Borrowing("x", (READ,))], "request x is to borrow KV, but is not live"),
        ([Borrowing("r", (READ,))], "request r is to borrow KV, but has begun"),
        (
            [Borrowing("a", (READ,)), Borrowing("a", (UNREAD,))],
            "request a is to borrow KV, but does so already",
        ),
        ([Borrowing("a", (READ, kv(3, 9)))], r"request a is to borrow positions range\(3, 6\) twice"),
        ([Borrowing("a", (kv(0, 6, 1),))], "a is to borrow .*instance_id=1.*, which is not there for it"),
        ([Borrowing("a", (kv(0, 6, 0, "kv-2"),))], "a is to borrow .*kv-2.*, which is not there for it"),
        ([Borrowing("a", (kv(10, 13),))], r"a is to borrow .*range\(10, 13\).*, which is not there for it"),
        ([Borrowing("b", (READ,))], "request b is to borrow .*, which is not there for it"),
    ],
)
def test_a_request_borrows_as_it_begins_once_and_what_is_there(
    borrowings: list[Borrowing], message: str
) -> None:
    cluster = snapshot("a")
    cluster = replace(cluster, waiting=(*cluster.waiting, waiting("b", NUM_PROMPT)))
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(cluster, IterationPlan(borrowings=tuple(borrowings)))


def test_a_request_may_borrow_any_part_of_what_is_there_and_computes_the_rest() -> None:
    cluster = snapshot("a")
    for segments in ((READ, UNREAD, ELSEWHERE), (kv(2, 10),), (kv(1, 12, step=3), kv(13, 14, 1, "kv-2")), ()):
        check_plan(cluster, plan_of([cluster.request["a"]], Borrowing("a", segments)))
    plan = plan_of([cluster.request["a"]], Borrowing("a", (READ,)))
    with pytest.raises(InvalidPlanError):
        check_plan(cluster, replace(plan, borrowings=()))


def test_a_request_that_does_not_begin_borrows_nothing() -> None:
    cluster = snapshot("a", "b")
    plan = plan_of([cluster.request["a"]], Borrowing("a", (READ,)))
    idle = replace(plan, borrowings=(*plan.borrowings, Borrowing("b", (UNREAD,))))
    assert idle.effective_borrowings == plan.effective_borrowings == plan.borrowings
    assert cluster.after(idle) == cluster.after(plan)
    nothing = IterationPlan(borrowings=idle.borrowings)
    check_plan(cluster, nothing)
    assert nothing.effective_borrowings == ()
    assert cluster.after(nothing) is cluster


@given(seed=st.integers(0, 2**32))
def test_what_nobody_read_is_in_use_once_it_is_borrowed(seed: int) -> None:
    random, cluster = Random(seed), snapshot("a", "b")
    tokens = [
        (c.segment._replace(positions=range(p, p + 1)), c.is_read)
        for c in CACHED
        for p in c.segment.positions
    ]
    chosen = {name: random.sample(tokens, random.randint(1, len(tokens))) for name in "ab"}
    borrowings = [Borrowing(name, tuple(s for s, _ in found)) for name, found in chosen.items()]
    plan = plan_of([cluster.request[name] for name in "ab"], *borrowings)
    after = cluster.after(plan)
    newly = {s for found in chosen.values() for s, is_read in found if not is_read}
    already = cluster.read_tokens_to_borrow(plan)
    for before, instance in zip(cluster.instances, after.instances, strict=True):
        num_new = sum(s.instance_id == instance.instance_id for s in newly)
        assert (instance.kv_used, instance.kv_cached) == (
            before.kv_used + num_new,
            before.kv_cached - num_new,
        )
        all_here = [s for found in chosen.values() for s, _ in found if s.instance_id == instance.instance_id]
        assert already[instance.instance_id] == len(all_here) - num_new
    for name, found in chosen.items():
        view = after.request[name]
        assert (view.cached, view.num_computed_tokens, view.has_begun) == ((), len(found), True)
        assert {s.owner_id for s in view.placement.segments} == {name}
    assert after.request["r"] is cluster.request["r"]


def test_slots_of_a_preempted_request_that_another_borrows_are_not_free() -> None:
    cluster = snapshot("a")
    full = [replace(i, kv_used=i.kv_capacity - 4, kv_cached=0) for i in cluster.instances]
    cached = (CachedKV(READ, is_read=True),)
    cluster = replace(cluster, instances=tuple(full), waiting=(replace(with_cached("a"), cached=cached),))
    view = cluster.request["a"].borrowing([READ])
    batch = prefill([view], (0,), num_tokens=10)
    preemption = Preemption("r", PreemptionReason.NO_ROOM)
    plan = IterationPlan((batch,), preemptions=(preemption,), borrowings=(Borrowing("a", (READ,)),))
    with pytest.raises(InvalidPlanError, match="instance 0 is to store 10 tokens but has room for 4"):
        check_plan(cluster, plan)
    check_plan(cluster, replace(plan, batches=(prefill([view], (0,), num_tokens=4),)))


def test_a_request_that_is_assumed_to_borrow_waits_and_needs_slots_for_what_nobody_reads() -> None:
    alone = with_cached("a")
    assert alone.num_tokens_to_come == alone.num_final_tokens == NUM_PROMPT + 3
    assert not alone.num_unread_tokens()
    view = alone.borrowing([READ, UNREAD, ELSEWHERE])
    assert view.placement == Placement((KVSegment("a", range(12), 0), KVSegment("a", range(12, 16), 1)))
    assert not view.has_begun
    assert replace(view, cached=()).has_begun
    assert view.num_unread_tokens() == {0: 6, 1: 4}
    assert view.num_tokens_to_come == NUM_PROMPT + 3 - 16 + 10
    assert replace(view, has_ended=True).num_tokens_to_come == 0
