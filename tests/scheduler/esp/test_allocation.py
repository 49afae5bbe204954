"""The instances of prompts: long prompts on many, short ones at once, none on two groups."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import H200, H200_CAPACITY
from plans import decode
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.cost.cost_model import CostModel
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import PrefillAdmission, by_deadline
from loong.scheduler.esp.allocation import MAX_DEMANDS, Allocation
from loong.scheduler.esp.group import Group

LONG, SHORT = 200_000, 500


class _Narrow(Allocation):
    grows = False


def allocated(
    snapshot: Snapshot,
    config: PolicyConfig | None = None,
    kind: type[Allocation] = Allocation,
    cost_model: CostModel = H200,
) -> list[Group]:
    found, config = make_planning_view(snapshot), config or PolicyConfig()
    order = PrefillAdmission(found, cost_model, config, by_deadline).admit().prefills
    return kind(found, cost_model, config).allocate(order)


def instances_of(group: Group) -> list[int]:
    return sorted(i for instance_set in group.instance_sets for i in instance_set.instance_ids)


def dops(groups: list[Group]) -> dict[str, int]:
    """Return the DoP that each prompt is to have."""
    return {prefill.view.request_id: group.dop for group in groups for prefill in group.prefills}


def homes(groups: list[Group]) -> dict[str, list[int]]:
    """Return the instances that each prompt is to have."""
    return {prefill.view.request_id: instances_of(group) for group in groups for prefill in group.prefills}


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw prompts of all lengths, begun or not, with decodes in flight or not, and much room or less."""
    num_instances = draw(st.integers(1, 8))
    ids = st.lists(st.integers(0, num_instances - 1), min_size=1, max_size=3, unique=True).map(tuple)
    lengths = st.sampled_from([1, 300, 3000, 50_000, 400_000])
    views: list[RequestView] = []
    for number in range(draw(st.integers(0, 12))):
        kind, length = draw(st.sampled_from(["wait", "wait", "begun", "decode"])), draw(lengths)
        if kind == "wait":
            views.append(waiting(f"w{number}", length, arrival_time=number / 100))
        elif kind == "begun":
            views.append(begun(f"b{number}", length + 500, 500, draw(ids)))
        else:
            views.append(decoding(f"d{number}", length, draw(ids)))
    busy = draw(st.sets(st.integers(0, num_instances - 1)))
    flying = [decoding(f"f{i}", 100, (i,)) for i in busy]
    batches = [
        running(i, replace(decode([view], (i,), {view.request_id: i}, num_steps=8), predicted_time=0.01))
        for i, view in zip(busy, flying, strict=True)
    ]
    held = sum(view.num_known_tokens for view in views if view.has_begun) + 1000
    room = draw(st.sampled_from([0, 1000, 10**6]))
    lengths_seen = draw(st.sampled_from([(), (SHORT,), (LONG,)]))
    return snapshot_of(
        [held + room] * num_instances,
        [*views, *flying],
        batches,
        now=draw(st.floats(0.1, 30)),
        recent_prompt_lengths=lengths_seen,
    )


@settings(max_examples=100)
@given(snapshots())
def test_every_unit_that_holds_anything_is_in_one_group_and_every_prompt_in_one_at_most(
    snapshot: Snapshot,
) -> None:
    groups, found = allocated(snapshot), make_planning_view(snapshot)
    instance_sets = [instance_set.instance_ids for group in groups for instance_set in group.instance_sets]
    assert len(instance_sets) == len(set(instance_sets))
    assert {instance_set.instance_ids for instance_set in found.occupied} <= set(instance_sets)
    assert set(instance_sets) <= {instance_set.instance_ids for instance_set in found.instance_sets}
    placed = [prefill.view.request_id for group in groups for prefill in group.prefills]
    assert len(placed) == len(set(placed))
    for group in groups:
        held = {i for prefill in group.prefills for i in prefill.view.placement.instance_ids}
        assert held <= set(instances_of(group))
        assert [p.rank for p in group.prefills] == sorted(p.rank for p in group.prefills)
    assert {view.request_id for instance_set in found.instance_sets for view in instance_set.prefills} <= set(
        placed
    )


@settings(max_examples=100)
@given(snapshots())
def test_no_slot_is_promised_twice(snapshot: Snapshot) -> None:
    found, config = make_planning_view(snapshot), PolicyConfig()
    allocation = Allocation(found, H200, config)
    order = PrefillAdmission(found, H200, config, by_deadline).admit().prefills
    for group in allocation.allocate(order):
        promised = sum(p.num_tokens if p.is_begun else allocation.demand(p) for p in group.prefills)
        promised += sum(
            min(config.lease_steps, view.num_remaining_tokens)
            for instance_set in group.instance_sets
            for view in instance_set.decodes
        )
        assert group.spare == sum(found.free[i] for i in instances_of(group)) - promised
        assert group.spare >= 0 or all(p.is_begun for p in group.prefills)


def test_a_long_prompt_takes_all_that_is_idle() -> None:
    assert dops(allocated(snapshot_of([H200_CAPACITY] * 8, [waiting("long", LONG)]))) == {"long": 8}


def test_instances_are_kept_for_short_prompts_if_some_came_lately() -> None:
    for seen, expected in (((SHORT,), 6), ((LONG,), 8), ((LONG, SHORT, LONG), 6)):
        snapshot = snapshot_of([H200_CAPACITY] * 8, [waiting("long", LONG)], recent_prompt_lengths=seen)
        assert dops(allocated(snapshot)) == {"long": expected}


def test_a_deadline_overrides_the_instances_that_are_kept() -> None:
    for ttft, expected in ((3.8, 8), (30.0, 6)):
        view = waiting("long", LONG, slo=SLO(ttft, 1.0))
        snapshot = snapshot_of([H200_CAPACITY] * 8, [view], recent_prompt_lengths=(SHORT,))
        assert dops(allocated(snapshot)) == {"long": expected}


def test_a_long_prompt_widens_into_idle_instances_and_keeps_its_own() -> None:
    long, busy = begun("long", LONG, 10_000, (0, 1)), decoding("busy", 100, (2,))
    lease = replace(decode([busy], (2,), {"busy": 2}, num_steps=16), predicted_time=100.0)
    snapshot = snapshot_of([H200_CAPACITY] * 4, [long, busy], [running(0, lease)])
    assert homes(allocated(snapshot)) == {"long": [0, 1, 3]}
    assert homes(allocated(snapshot, kind=_Narrow)) == {"long": [0, 1]}


def test_a_long_prompt_waits_for_instances_that_are_worth_it() -> None:
    busy = [decoding(f"b{i}", 100, (i,)) for i in range(1, 4)]
    batches = [
        running(i, replace(decode([view], (i,), {view.request_id: i}), predicted_time=0.01))
        for i, view in enumerate(busy, 1)
    ]
    snapshot = snapshot_of([H200_CAPACITY] * 4, [waiting("long", LONG), *busy], batches)
    (group,) = (group for group in allocated(snapshot) if group.prefills)
    assert (group.dop, group.is_ready, group.available_in) == (4, False, 0.01)
    assert group.num_decodes == 3


def test_two_long_prompts_share_the_cluster() -> None:
    views = [waiting("a", LONG, arrival_time=0.0), waiting("b", LONG, arrival_time=0.1)]
    groups = allocated(snapshot_of([H200_CAPACITY] * 8, views, now=0.1))
    assert set(dops(groups)) == {"a", "b"}
    assert sum(group.dop for group in groups) == 8


def test_a_prompt_that_fits_on_no_single_group_is_spread() -> None:
    assert len(homes(allocated(snapshot_of([200, 350, 300], [waiting("p", SHORT)])))["p"]) > 1


@pytest.mark.parametrize("num_instances", [16, 20, 40])
def test_a_prompt_may_need_the_room_of_any_number_of_instances(num_instances: int) -> None:
    view = waiting("p", 100 * num_instances - 50)
    assert dops(allocated(snapshot_of([100] * num_instances, [view]))) == {"p": num_instances}


def test_what_fits_on_all_together_only_takes_all_and_what_fits_nowhere_is_left_out() -> None:
    assert dops(allocated(snapshot_of([200] * 3, [waiting("p", SHORT)]))) == {"p": 3}
    own = [decoding(f"d{i}", 90, (i,)) for i in range(3)]
    assert dops(allocated(snapshot_of([200] * 3, [*own, waiting("p", 280)]))) == {}


def test_a_short_prompt_goes_where_no_long_one_is() -> None:
    long = begun("long", LONG, 10_000, (0, 1, 2))
    snapshot = snapshot_of([H200_CAPACITY] * 4, [long, waiting("s", SHORT)], recent_prompt_lengths=(SHORT,))
    assert homes(allocated(snapshot)) == {"long": [0, 1, 2], "s": [3]}


def test_a_short_prompt_joins_a_long_one_rather_than_wait_longer() -> None:
    long, busy = begun("long", LONG, 10_000, (0, 1, 2)), decoding("busy", 100, (3,))
    for seconds, expected in ((0.01, [3]), (1.0, [0, 1, 2])):
        lease = replace(decode([busy], (3,), {"busy": 3}), predicted_time=seconds)
        snapshot = snapshot_of(
            [H200_CAPACITY] * 4,
            [long, busy, waiting("s", SHORT)],
            [running(0, lease)],
            recent_prompt_lengths=(SHORT,),
        )
        assert homes(allocated(snapshot))["s"] == expected


@pytest.mark.parametrize("num_tokens", [6000, 12_000])
def test_a_lone_prompt_spreads_more_than_one_in_a_crowd(num_tokens: int) -> None:
    crowd = [decoding(f"d{n}", 100, (n % 8,)) for n in range(64)]
    alone, among = (
        dops(allocated(snapshot_of([H200_CAPACITY] * 8, [*others, waiting("p", num_tokens)])))["p"]
        for others in ([], crowd)
    )
    assert alone > 2
    assert among < alone


def test_a_short_prompt_stays_alone_where_launching_a_ring_takes_longer() -> None:
    launching = replace(H200, graph_limits=replace(H200.graph_limits, most_kv_rows=0))
    for num_tokens in (4, SHORT):
        snapshot = snapshot_of([H200_CAPACITY] * 8, [waiting("p", num_tokens)])
        assert dops(allocated(snapshot, cost_model=launching))["p"] == 1


@pytest.mark.parametrize(("seconds", "expected"), [(100.0, 2), (2.5, 4), (1.3, 8)])
def test_prompts_that_compete_have_equal_shares_but_for_those_that_would_be_late(
    seconds: float, expected: int
) -> None:
    others = [waiting(f"p{n}", LONG // 2, slo=SLO(100.0, 0.05)) for n in range(3)]
    urgent = waiting("urgent", LONG // 2, slo=SLO(seconds, 0.05))
    groups = allocated(snapshot_of([H200_CAPACITY] * 8, [urgent, *others]))
    assert dops(groups)["urgent"] == expected


def test_short_prompts_that_begin_together_are_spread_over_the_groups() -> None:
    views = [waiting(f"p{n}", 3000) for n in range(8)]
    groups = allocated(snapshot_of([H200_CAPACITY] * 8, views))
    assert dops(groups) == {f"p{n}": 1 for n in range(8)}
    assert max(len(group.prefills) for group in groups) == 1


def test_more_prompts_than_the_program_is_asked_go_where_they_are_done_first() -> None:
    views = [waiting(f"p{n:02}", 1000) for n in range(MAX_DEMANDS + 8)]
    groups = allocated(snapshot_of([H200_CAPACITY] * 4, views))
    assert [len(group.prefills) for group in groups] == [(MAX_DEMANDS + 8) // 4] * 4


def test_groups_that_go_on_with_prompts_are_not_batched_anew() -> None:
    going_on = [begun(f"b{i}", 4000, 100, (i,)) for i in range(2)]
    groups = allocated(snapshot_of([H200_CAPACITY] * 2, [*going_on, waiting("p", SHORT)]))
    assert dops(groups) == {"b0": 1, "b1": 1, "p": 1}


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_prompt_waits_for_what_is_due_before_it_but_not_for_what_was_deferred(is_deferred: bool) -> None:
    found = make_planning_view(snapshot_of([H200_CAPACITY], [waiting("a", 50_000), waiting("b", 50_000)]))
    first, second = PrefillAdmission(found, H200, PolicyConfig(), by_deadline).admit().prefills
    first.is_deferred = is_deferred
    group = Group(list(found.instance_sets), [first])
    assert group.wait_of(second) == (0.0 if is_deferred else first.work)
    assert Group(list(found.instance_sets), [second]).wait_of(first) == 0.0
