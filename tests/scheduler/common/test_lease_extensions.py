"""Leases that go on, and those that are left to end."""

from dataclasses import replace

import pytest
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.plan import IterationPlan, LeaseEnd, LeaseExtension
from loong.core.request import RequestView
from loong.core.snapshot import EXTENSION_STEPS, RunningBatch, Snapshot
from loong.scheduler.common.lease_extensions import extending
from loong.scheduler.tuning import LONG_LEASE_FACTOR, MAX_EXTENSION_FACTOR, MIN_LIVE_SHARE

STEPS = 16
LONG = LONG_LEASE_FACTOR * STEPS
VIEWS = [decoding(f"r{n}", 20, (0,), max_tokens=5000) for n in range(4)]


def lease(
    *views: RequestView, group: tuple[int, ...] = (0,), num_steps: int = STEPS, num_taken: int | None = None
) -> RunningBatch:
    """Return one that comes near its end, unless `num_taken` says otherwise."""
    masters = {view.request_id: view.placement.segments[-1].instance_id for view in views}
    plan = decode(views, group, masters, num_steps=num_steps)
    taken = max(1, num_steps - EXTENSION_STEPS) if num_taken is None else num_taken
    return running(3, plan, num_steps_taken=taken)


def extended(snapshot: Snapshot, plan: IterationPlan | None = None) -> int | None:
    """Return the steps that the lease is to have, if it is extended; the plan keeps the rules."""
    plan = extending(plan or IterationPlan(), snapshot, STEPS)
    check_plan(snapshot, plan)
    if not plan.lease_extensions:
        return None
    (extension,) = plan.lease_extensions
    return extension.num_steps


def test_a_lease_of_one_instance_goes_on_for_long_and_one_of_several_for_a_while() -> None:
    assert extended(snapshot_of([50_000], VIEWS, [lease(*VIEWS)])) == STEPS + LONG
    spread = [decoding("r", 20, (0, 1), max_tokens=5000)]
    batch = lease(*spread, group=(0, 1))
    assert extended(snapshot_of([50_000] * 2, spread, [batch])) == 2 * STEPS


def test_no_lease_goes_on_for_longer_than_its_requests() -> None:
    views = [decoding("a", 20, (0,), max_tokens=20), decoding("b", 20, (0,), max_tokens=30)]
    assert extended(snapshot_of([9000], views, [lease(*views)])) == 29
    views = [decoding("a", 20, (0,), max_tokens=17)]
    assert extended(snapshot_of([9000], views, [lease(*views)])) is None


def test_no_lease_goes_on_for_ever() -> None:
    batch = lease(*VIEWS, num_steps=MAX_EXTENSION_FACTOR * LONG - STEPS)
    assert extended(snapshot_of([50_000], VIEWS, [batch])) == MAX_EXTENSION_FACTOR * LONG
    batch = lease(*VIEWS, num_steps=MAX_EXTENSION_FACTOR * LONG)
    assert extended(snapshot_of([50_000], VIEWS, [batch])) is None
    spread = [decoding("r", 20, (0, 1), max_tokens=5000)]
    batch = lease(*spread, group=(0, 1), num_steps=LONG)
    assert extended(snapshot_of([50_000] * 2, spread, [batch])) is None


def test_a_lease_that_is_not_near_its_end_is_left_alone() -> None:
    assert extended(snapshot_of([50_000], VIEWS, [lease(*VIEWS, num_taken=3)])) is None


def test_a_lease_that_ends_early_is_left_alone() -> None:
    batch = replace(lease(*VIEWS), last_step=STEPS - 1)
    assert extended(snapshot_of([50_000], VIEWS, [batch])) is None
    plan = IterationPlan(lease_ends=(LeaseEnd(3, STEPS),))
    assert extended(snapshot_of([50_000], VIEWS, [lease(*VIEWS)]), plan) is None


def test_no_lease_goes_on_while_a_request_waits_or_rests_for_which_nothing_is_planned() -> None:
    batch = lease(*VIEWS)
    assert extended(snapshot_of([50_000], [*VIEWS, waiting("new", 30)], [batch])) is None
    resting = decoding("resting", 20, (1,), max_tokens=90)
    snapshot = snapshot_of([50_000] * 2, [*VIEWS, resting], [batch])
    assert extended(snapshot) is None
    plan = IterationPlan((decode([resting], (1,), {"resting": 1}),))
    assert extended(snapshot, plan) == STEPS + LONG


@pytest.mark.parametrize("num_ended", range(5))
def test_a_lease_of_which_many_requests_have_ended_ends_so_that_their_kv_is_free(num_ended: int) -> None:
    snapshot = snapshot_of([50_000], VIEWS, [lease(*VIEWS)])
    views = [replace(view, has_ended=n < num_ended) for n, view in enumerate(snapshot.running)]
    goes_on = extended(replace(snapshot, running=tuple(views))) is not None
    assert goes_on == (4 - num_ended >= MIN_LIVE_SHARE * 4)


def test_a_group_that_its_requests_no_longer_tie_together_parts() -> None:
    apart = [decoding("a", 20, (0,), max_tokens=500), decoding("b", 20, (1,), max_tokens=500)]
    tie = decoding("tie", 20, (0, 1), max_tokens=500)
    assert extended(snapshot_of([9000] * 2, apart, [lease(*apart, group=(0, 1))])) is None
    tied = snapshot_of([9000] * 2, [*apart, tie], [lease(*apart, tie, group=(0, 1))])
    assert extended(tied) == 2 * STEPS
    views = [replace(view, has_ended=view.request_id == "tie") for view in tied.running]
    more = [decoding(f"c{n}", 20, (0,), max_tokens=500) for n in range(2)]
    tied = snapshot_of([9000] * 2, [*apart, *more, tie], [lease(*apart, *more, tie, group=(0, 1))])
    views = [replace(view, has_ended=view.request_id == "tie") for view in tied.running]
    assert extended(replace(tied, running=tuple(views))) is None


def test_a_lease_goes_on_as_far_as_half_of_the_room_and_nobody_lacks_what_he_needs_to_end() -> None:
    views = [decoding("a", 20, (0,), max_tokens=100)]
    batch = lease(*views)
    held = 20 + STEPS
    assert extended(snapshot_of([held + 300], views, [batch])) == 99
    assert extended(snapshot_of([held + 119 + 64], views, [batch])) is None  # 83 are too many at once
    views = [decoding("a", 20, (0,), max_tokens=1000)]
    snapshot = snapshot_of([held + 40, 9000], views, [lease(*views)])
    assert extended(snapshot) == STEPS + 20
    assert extended(snapshot_of([held + 30, 9000], views, [lease(*views)])) is None


def test_each_of_several_leases_goes_on() -> None:
    views = [decoding(f"r{n}", 20, (n,), max_tokens=5000) for n in range(3)]
    batches = [replace(lease(view, group=(n,)), batch_id=n) for n, view in enumerate(views)]
    snapshot = snapshot_of([50_000] * 3, views, batches)
    plan = extending(IterationPlan(), snapshot, STEPS)
    check_plan(snapshot, plan)
    assert plan.lease_extensions == tuple(LeaseExtension(n, STEPS + LONG) for n in range(3))
