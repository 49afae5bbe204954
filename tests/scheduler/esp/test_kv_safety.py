"""Slots are granted so that all requests that hold KV can end, at any pace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from drafts import admitted_draft
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU
from plans import decode
from simulation import instances_with, simulate, timed_request
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.events import InstanceLost
from loong.core.placement import BorrowedKV, striped
from loong.core.request import Request, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.kv_safety import BankersAlgorithm, pause_unsafe
from loong.scheduler.esp.reasons import WaitReason
from loong.scheduler.tuning import LONG_LEASE_FACTOR


class Need(NamedTuple):
    """Slots that a request has, and those that it may still take."""

    request_id: str
    num_held: int
    num_needed: int


def banker_of(needs: Sequence[Need], num_free: int) -> BankersAlgorithm:
    request_ids = [need.request_id for need in needs]
    held, needed = (np.array([need[column] for need in needs], np.int64) for column in (1, 2))
    return BankersAlgorithm(request_ids, held, needed, num_free)


def can_all_end(needs: Sequence[Need], num_free: int) -> bool:
    """Return whether there is an order in which each finds all that it needs, by trying each first."""
    if not needs:
        return True
    return any(
        need.num_needed <= num_free
        and can_all_end([*needs[:place], *needs[place + 1 :]], num_free + need.num_held)
        for place, need in enumerate(needs)
    )


claims_of_few = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5).map(
    lambda sizes: [Need(f"r{place}", held, needed) for place, (held, needed) in enumerate(sizes)]
)


def after(needs: Sequence[Need], taken: dict[str, int]) -> list[Need]:
    return [
        Need(c.request_id, c.num_held + taken.get(c.request_id, 0), c.num_needed - taken.get(c.request_id, 0))
        for c in needs
    ]


@examples(40, thorough=800)
@given(claims_of_few, st.integers(0, 20), st.data())
def test_after_whatever_was_lent_all_can_still_end(
    needs: list[Need], num_free: int, data: st.DataObject
) -> None:
    banker, taken = banker_of(needs, num_free), dict[str, int]()
    for need in data.draw(st.permutations(needs)):
        demand = data.draw(st.integers(0, need.num_needed))
        if banker.grants({need.request_id: demand}):
            taken[need.request_id] = demand
    granted = after(needs, taken)
    if can_all_end(needs, num_free):
        assert can_all_end(granted, num_free - sum(taken.values()))
    more = [c.request_id for c in granted if c.num_held and c.num_needed and data.draw(st.booleans())]
    num_more = banker.num_more(more)
    if num_more is not None and can_all_end(needs, num_free):
        all_more = {c.request_id: min(num_more, c.num_needed) for c in granted if c.request_id in more}
        num_left = num_free - sum(taken.values()) - sum(all_more.values())
        assert can_all_end(after(granted, all_more), num_left)


def test_who_holds_nothing_may_not_begin_on_slots_that_another_has_got_meanwhile() -> None:
    needs = [Need("first", 0, 1), Need("second", 0, 1)]
    for first, second in (("first", "second"), ("second", "first")):
        banker = banker_of(needs, 1)
        assert banker.grants({first: 1})
        assert not banker.grants({second: 1})


@given(claims_of_few, st.integers(0, 20))
def test_who_needs_least_never_waits_for_others(needs: list[Need], num_free: int) -> None:
    least = min(needs, key=lambda need: need.num_needed)
    has_begun, has_room = least.num_held > 0, least.num_needed <= num_free
    is_granted = banker_of(needs, num_free).grants({least.request_id: least.num_needed})
    assert is_granted == (has_begun or has_room)


def test_nobody_takes_what_another_needs_to_end() -> None:
    banker = banker_of([Need("near", 90, 4), Need("far", 5, 50)], num_free=6)
    assert not banker.grants({"far": 3})
    assert banker.grants({"far": 2})
    assert not banker.grants({"far": 1})
    assert banker.grants({"near": 4})
    assert not banker_of([Need("near", 90, 4), Need("far", 5, 50)], num_free=6).grants({"near": 4, "far": 3})


def test_as_many_more_as_each_may_have_at_once() -> None:
    needs = [Need("near", 90, 4), Need("far", 5, 50), Need("further", 5, 60)]
    assert banker_of(needs, 10).num_more(["near", "far", "further"]) == 3
    assert banker_of(needs, 10).num_more(["further"]) == 6
    assert banker_of(needs, 10).num_more(["near"]) is None
    assert banker_of([], 10).num_more([]) is None


LONG_LEASE = PolicyConfig().lease_steps * LONG_LEASE_FACTOR


class Safety(NamedTuple):
    """Requests that pause, and the most steps of a lease of the others."""

    paused_ids: frozenset[str]
    lease_steps: int


def safety_of(snapshot: Snapshot) -> Safety:
    admitted = admitted_draft(snapshot, CPU, PolicyConfig())
    draft = pause_unsafe(admitted)
    views = (*draft.view.decodes, *(prefill.view for prefill in admitted.prefills))
    going_on = (*draft.decodes, *(prefill.view for prefill in draft.prefills))
    paused_ids = frozenset(view.request_id for view in views if view not in going_on)
    reported = {
        i
        for decision in draft.decisions
        if decision.chosen == WaitReason.PAUSED
        for i in decision.request_ids
    }
    assert reported == paused_ids
    return Safety(paused_ids, draft.lease_steps)


def test_where_room_abounds_nobody_waits() -> None:
    views = [decoding("a", 100, (0,), 50), begun("b", 100, 30, (0,)), waiting("c", 100)]
    assert safety_of(snapshot_of([10_000], views)) == Safety(frozenset(), 16)


def test_one_with_much_to_decode_waits_for_one_about_to_end() -> None:
    near, far = decoding("near", 50, (0,), 5), decoding("far", 50, (0,), 60)
    for num_free, expected in (
        (4, Safety(frozenset({"far"}), LONG_LEASE)),
        (5, Safety(frozenset(), 1)),
        (11, Safety(frozenset(), 7)),
    ):
        assert safety_of(snapshot_of([100 + num_free], [near, far])) == expected


def test_a_prompt_that_has_begun_waits_if_a_decode_needs_its_room() -> None:
    near, prompt = decoding("near", 50, (0,), 9), begun("prompt", 70, 20, (0,))
    assert safety_of(snapshot_of([70 + 57], [near, prompt])).paused_ids == {"prompt"}
    assert safety_of(snapshot_of([70 + 58], [near, prompt])).paused_ids == frozenset()


def test_a_batch_in_flight_has_what_it_reserved_and_no_more() -> None:
    flying, other = decoding("flying", 50, (0,), 40), decoding("other", 20, (1,), 40)
    plan = decode([flying], (0,), {"flying": 0}, num_steps=16)
    snapshot = snapshot_of([70, 44], [flying, other], [running(0, plan)])
    assert safety_of(snapshot) == Safety(frozenset(), 5), "of 28, the other needs 23"
    ended = replace(snapshot, running=(replace(snapshot.running[0], has_ended=True), snapshot.running[1]))
    assert safety_of(ended) == Safety(frozenset(), LONG_LEASE)


def test_slots_that_choices_share_are_free_only_when_the_one_that_needs_most_has_ended() -> None:
    def choice(request_id: str, max_tokens: int) -> RequestView:
        borrowed = BorrowedKV("kv", striped("a", range(50), (0,)))
        return replace(decoding(request_id, 50, (0,), max_tokens), borrowed=(borrowed,))

    def paused_ids(num_needed: int) -> frozenset[str]:
        views = [choice("a", 5), decoding("other", 50, (0,), num_needed + 1), choice("a-1", 30)]
        snapshot = snapshot_of([150 + 20], views)  # the choices' prompt counts twice in the slots in use
        return safety_of(snapshot).paused_ids

    assert paused_ids(19) == frozenset()
    assert paused_ids(20) == {"a-1"}


def crowd(num_requests: int) -> list[Request]:
    """Return prompts that are long relative to their outputs, and the other way round."""
    return [timed_request(n, 5 + 61 * n % 130, 3 + 47 * n % 90, n * 3e-3) for n in range(num_requests)]


def test_after_the_loss_of_an_instance_all_end_though_they_hold_too_much() -> None:
    requests = crowd(30)
    losses = [InstanceLost(0.3, 1, "gone"), InstanceLost(0.4, 2, "gone")]
    run = simulate("esp", [250] * 3, requests, incidents=losses)
    assert {r: len(tokens) for r, tokens in run.tokens.items()} == {
        r.request_id: r.sampling_params.max_tokens for r in requests
    }


def test_a_crowd_that_fills_the_pools_is_served_without_a_preemption() -> None:
    run = simulate("esp", [200] * 3, crowd(60))
    assert run.stats.num_preemptions == 0
    most = max(sum(instance.kv_used for instance in snapshot.instances) for snapshot, _ in run.plans)
    assert most > 0.95 * sum(instance.kv_capacity for instance in instances_with([200] * 3))
