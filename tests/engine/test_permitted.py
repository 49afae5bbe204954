"""The part of a refused plan that is carried out keeps the rules, and leaves out no more than it must."""

from dataclasses import replace
from random import Random

import pytest
from chaos import any_plan
from hypothesis import given
from hypothesis import strategies as st
from plans import prefill
from simulation import simulate, timed_request
from snapshots import snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.errors import InvalidPlanError
from loong.core.placement import CachedKV, KVSegment
from loong.core.plan import Borrowing, IterationPlan, LeaseEnd, LeaseExtension, Preemption
from loong.core.snapshot import Snapshot
from loong.engine.permitted import permitted_part

RUN = simulate(
    "esp", [600] * 3, [timed_request(n, 20 + 97 * n % 500, 2 + n % 9, 3e-3 * n) for n in range(24)]
)
SNAPSHOTS = [snapshot for snapshot, _ in RUN.plans]


@given(snapshot=st.sampled_from(SNAPSHOTS), seed=st.integers(0, 2**32))
def test_all_of_a_valid_plan_is_permitted_with_or_without_parts_that_are_not(
    snapshot: Snapshot, seed: int
) -> None:
    plan = any_plan(Random(seed), snapshot)
    assert permitted_part(snapshot, plan).plan == replace(plan, decisions=())
    spoiled = replace(
        plan,
        preemptions=(Preemption("nobody"), *plan.preemptions),
        lease_ends=(*plan.lease_ends, LeaseEnd(0, 1)),
        lease_extensions=(*plan.lease_extensions, LeaseExtension(0, 9)),
    )
    with pytest.raises(InvalidPlanError):
        check_plan(snapshot, spoiled)
    found = permitted_part(snapshot, spoiled)
    check_plan(snapshot, found.plan)
    assert found.plan == replace(plan, decisions=())
    assert found.refused_ids == {"nobody"}


def test_of_two_batches_without_room_for_both_the_first_is_permitted() -> None:
    views = [waiting("a", 30), waiting("b", 30), waiting("c", 5)]
    snapshot = snapshot_of([48, 48], views)
    batches = tuple(
        prefill([view], (instance_id,)) for view, instance_id in zip(views, (0, 0, 1), strict=True)
    )
    found = permitted_part(snapshot, IterationPlan(batches))
    assert found.plan.batches == (batches[0], batches[2])
    assert found.refused_ids == {"b"}


def test_borrowings_that_keep_the_rules_are_permitted_with_the_batches_that_need_them() -> None:
    segments = {name: KVSegment("kv-1", range(8), instance_id) for instance_id, name in enumerate("ab")}
    views = [
        replace(waiting(name, 20), cached=(CachedKV(segment, is_read=True),))
        for name, segment in segments.items()
    ]
    snapshot = snapshot_of([48, 48, 48], [*views, waiting("c", 5)])
    begun = [view.borrowing([segments[view.request_id]]) for view in views]
    batches = (prefill(begun[:1], (0,)), prefill(begun[1:], (1,)), prefill([snapshot.request["c"]], (2,)))
    right, wrong = Borrowing("a", (segments["a"],)), Borrowing("b", (segments["a"], segments["b"]))
    found = permitted_part(snapshot, IterationPlan(batches, borrowings=(right, wrong)))
    assert found.plan == IterationPlan((batches[0], batches[2]), borrowings=(right,))
    assert found.refused_ids == {"b"}
