"""The order of prompts, and who may enter: few are late, none is overtaken for ever, and none is evicted."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from drafts import admitted_draft
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from machines import CPU, H200
from plans import decode
from simulation import Run, simulate, timed_request
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.placement import BorrowedKV, Placement, striped
from loong.core.request import SLO, Request, RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.config import Fairness, PolicyConfig
from loong.scheduler.esp.admission import KVForecast
from loong.scheduler.esp.draft import PlanDraft, Variant
from loong.scheduler.esp.prompt_order import (
    PrefillCandidate,
    by_arrival,
    by_deadline,
    prefill_work,
    with_fair_deadlines,
)
from loong.scheduler.esp.reasons import WaitReason
from loong.scheduler.tuning import MAX_CONSIDERED, MISSED_DEADLINE_WEIGHT, PLANNED_TTFT_SHARE


def prompt(
    number: int,
    work: float,
    deadline: float,
    *,
    arrival: float = 0.0,
    missed_deadline: bool = False,
    user: str = "",
) -> PrefillCandidate:
    view = replace(waiting(f"r{number}", 9, arrival_time=arrival), user=user)
    return PrefillCandidate(view, 9, 0, work, 1.0, deadline, missed_deadline)


def admission_of(
    snapshot: Snapshot, config: PolicyConfig | None = None, *, order: str = "by_deadline"
) -> PlanDraft:
    variant = Variant(order={"by_deadline": by_deadline, "by_arrival": by_arrival}[order])
    return admitted_draft(snapshot, CPU, config or PolicyConfig(), variant)


def refused(draft: PlanDraft) -> dict[str, tuple[RequestId, ...]]:
    """Return the prompts that may not begin, by the reason."""
    return {decision.chosen: decision.request_ids for decision in draft.decisions}


def ids(prefills: Iterable[PrefillCandidate]) -> list[str]:
    return [prefill.view.request_id for prefill in prefills]


def in_time(prefills: Sequence[PrefillCandidate], now: float, speed: float) -> bool:
    """Return whether all end by their deadlines, one after the other."""
    end = now
    for prefill in prefills:
        end += prefill.work / speed
        if end > prefill.deadline:
            return False
    return True


prompts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=7).map(
    lambda shapes: [
        prompt(number, float(work), float(deadline), arrival=number / 8)
        for number, (work, deadline) in enumerate(shapes)
    ]
)


@given(prompts, st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]))
def test_no_order_at_all_makes_fewer_late(prefills: list[PrefillCandidate], now: int, speed: float) -> None:
    ordered = by_deadline(prefills, now, speed)
    by_due = sorted(prefills, key=lambda p: p.deadline)
    most = max(
        size
        for size in range(len(prefills) + 1)
        if any(in_time(chosen, now, speed) for chosen in combinations(by_due, size))
    )
    assert sum(not p.is_deferred for p in ordered) == most


@given(prompts, st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]), st.sets(st.integers(0, 6)))
@example([prompt(0, 1.0, 1.9), prompt(1, 3.0, 2.0)], 0, 1.0, {0})  # the first to go is not enough
def test_those_on_time_are_and_those_deferred_come_after_them_by_arrival(
    prefills: list[PrefillCandidate], now: int, speed: float, missed: set[int]
) -> None:
    for number in missed.intersection(range(len(prefills))):
        prefills[number].missed_deadline = True
    ordered = by_deadline(prefills, now, speed)
    assert sorted(ids(ordered)) == sorted(ids(prefills))
    on_time = [p for p in ordered if not p.is_deferred]
    late = [p for p in ordered if p.is_deferred]
    assert ordered == on_time + late
    assert in_time(on_time, now, speed)
    assert ids(late) == sorted(ids(late))


def test_one_that_has_missed_its_deadline_is_deferred_before_one_not_much_longer() -> None:
    for work, late in ((MISSED_DEADLINE_WEIGHT - 1.0, "r0"), (MISSED_DEADLINE_WEIGHT + 1.0, "r1")):
        missed, fresh = prompt(0, 1.0, work + 0.5, missed_deadline=True), prompt(1, work, work + 0.5)
        assert [p.view.request_id for p in by_deadline([missed, fresh], 0.0, 1.0) if p.is_deferred] == [late]


def test_by_arrival_nobody_is_deferred() -> None:
    prefills = [prompt(0, 9.0, 1.0, arrival=2.0), prompt(1, 9.0, 5.0, arrival=1.0)]
    ordered = by_arrival(prefills, 0.0, 1.0)
    assert ids(ordered) == ["r1", "r0"]
    assert not any(p.is_deferred for p in ordered)


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_the_work_of_a_prompt_is_that_of_its_chunks(num_cached: int, num_new: int) -> None:
    terms, half = CPU.prefill_terms(1), num_new // 2
    first, rest = (
        prefill_work(half, num_cached, terms),
        prefill_work(num_new - half, num_cached + half, terms),
    )
    assert first + rest == pytest.approx(prefill_work(num_new, num_cached, terms))


@given(st.floats(0.1, 5.0), st.floats(0.0, 1e3))
def test_a_target_that_is_missed_doubles_until_it_can_be_met(ttft: float, now: float) -> None:
    view = waiting("r", 100, slo=SLO(ttft, 1.0))
    (prefill,) = admission_of(snapshot_of([999] * 2, [view], now=now)).prefills
    earliest = now + prefill.work / 2
    planned = PLANNED_TTFT_SHARE * ttft
    assert prefill.ttft == ttft
    assert prefill.missed_deadline == (planned < earliest)
    assert prefill.deadline >= earliest
    assert prefill.deadline == planned or prefill.deadline / 2 < earliest


def test_prompts_are_ranked_in_their_order_the_begun_among_the_others() -> None:
    views = [
        waiting("due later", 50, slo=SLO(9.0, 1.0)),
        waiting("due soon", 50, slo=SLO(1.0, 1.0)),
        replace(begun("begun", 50, 20, (0,)), slo=SLO(5.0, 1.0)),
    ]
    found = admission_of(snapshot_of([999], views))
    assert ids(found.prefills) == ["due soon", "begun", "due later"]
    assert [p.rank for p in found.prefills] == [0, 1, 2]
    assert [(p.num_tokens, p.num_cached, p.is_begun) for p in found.prefills] == [
        (50, 0, False),
        (30, 20, True),
        (50, 0, False),
    ]


def test_a_request_that_lost_its_kv_has_its_outputs_to_compute_too() -> None:
    view = RequestView("r", 100, 7, 16, 0.0, None, Placement())
    (prefill,) = admission_of(snapshot_of([999], [view])).prefills
    assert (prefill.num_tokens, prefill.num_cached) == (107, 0)


def test_only_what_fits_to_its_declared_end_is_admitted() -> None:
    fits, does_not = waiting("a", 40, 11), waiting("b", 41, 11)
    for view, admitted in ((fits, True), (does_not, False)):
        snapshot = snapshot_of([59, 40], [decoding("d", 40, (0,), 11), view])
        found = admission_of(snapshot)
        assert bool(found.prefills) == admitted
        assert refused(found) == ({} if admitted else {WaitReason.NO_ROOM: ("b",)})
        assert KVForecast(99, snapshot.running).takes(view) == admitted


LENGTH = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(10, 30), st.integers(0, 3))


@given(st.lists(LENGTH, max_size=6), st.lists(LENGTH, min_size=1, max_size=4), st.integers(1, 500))
def test_bounds_of_the_forecast_admit_just_what_the_exact_future_has_room_for(
    old: list[tuple[int, int, int, int]], new: list[tuple[int, int, int, int]], capacity: int
) -> None:
    views = [
        replace(decoding(f"d{i}", num_prompt, (0,), most, num_output), num_siblings=num_siblings)
        for i, (num_prompt, num_output, most, num_siblings) in enumerate(old)
    ]
    if len(views) > 1:  # the first two share their prompt, as far as both have it
        borrowed = BorrowedKV("kv", striped("kv", range(min(old[0][0], old[1][0])), (0,)))
        views[:2] = [replace(view, borrowed=(borrowed,), num_siblings=0) for view in views[:2]]
    forecast, future = KVForecast(capacity, views), FutureKV.of(Lengths.of(views))
    for i, (num_prompt, _, most, num_siblings) in enumerate(new):
        view = replace(waiting(f"w{i}", num_prompt, most), num_siblings=num_siblings)
        has_room = future.adding(view).peak <= capacity
        assert forecast.takes(view) == has_room
        future = future.adding(view) if has_room else future


def test_room_counts_what_was_admitted_before_and_not_what_has_ended() -> None:
    first, second = waiting("a", 50, 11), waiting("b", 30, 11)
    found = admission_of(snapshot_of([99], [first, second]))
    assert (ids(found.prefills), refused(found)) == (["a"], {WaitReason.NO_ROOM: ("b",)})
    ended = decoding("ended", 60, (0,))
    batch = running(0, decode([ended], (0,), {"ended": 0}))
    snapshot = snapshot_of([99, 0], [ended, first], [batch])
    assert not admission_of(snapshot).prefills
    gone = replace(snapshot, running=(replace(snapshot.running[0], has_ended=True),))
    assert ids(admission_of(gone).prefills) == ["a"]


def test_requests_that_end_at_different_times_share_room() -> None:
    ending, fresh = decoding("ending", 50, (0,), max_tokens=3), waiting("fresh", 20, 60)
    assert ids(admission_of(snapshot_of([80], [ending, fresh])).prefills) == ["fresh"]


def test_however_many_are_refused_for_room_a_smaller_one_is_admitted() -> None:
    held = decoding("held", 98, (0,), 3)
    large = [waiting(f"a{n:02}", 100 - n, 2, slo=SLO(1.0, 1.0)) for n in range(9)]
    small = waiting("z", 1, 2, slo=SLO(2.0, 1.0))
    assert ids(admission_of(snapshot_of([150], [held, *large, small])).prefills) == ["z"]


@pytest.mark.parametrize(("now", "admitted"), [(3.9, ["new"]), (4.1, [])])
def test_who_has_waited_long_for_room_is_overtaken_no_more(now: float, admitted: list[str]) -> None:
    held = decoding("held", 100, (0,), 2)
    large = waiting("large", 100, 2, arrival_time=0.0, slo=SLO(1.0, 1.0))
    new = waiting("new", 10, 2, arrival_time=now, slo=SLO(0.5, 1.0))
    older = waiting("older", 1, 2, arrival_time=-1.0, slo=SLO(9.0, 1.0))
    late = waiting("last", 10, 2, arrival_time=now, slo=SLO(99.0, 1.0))
    found = admission_of(snapshot_of([150, 20], [held, large, older, late], now=now))
    assert ids(found.prefills) == (["older", "last"] if admitted else ["older"])
    assert refused(found).get(WaitReason.OVERTAKING, ()) == (() if admitted else ("last",))
    assert ids(admission_of(snapshot_of([150, 20], [held, large, new], now=now)).prefills) == (
        ["new"] if admitted else []
    )


def test_of_a_great_crowd_the_oldest_and_the_newest_are_weighed() -> None:
    (half, rest), num_waiting = divmod(MAX_CONSIDERED, 2), MAX_CONSIDERED + 3
    views = [waiting(f"r{n:04}", 1, 2, arrival_time=n / 1e4) for n in range(num_waiting)]
    found = admission_of(snapshot_of([99_999], views, now=1.0))
    assert rest == 0
    assert refused(found) == {WaitReason.NOT_CONSIDERED: tuple(view.request_id for view in views[half:-half])}
    assert sorted(ids(found.prefills)) == [v.request_id for v in (*views[:half], *views[-half:])]
    for others in (views[:-3], [replace(view, user="u") for view in views]):
        config = PolicyConfig(fairness=Fairness.USER if others[0].user else Fairness.NONE)
        assert len(admission_of(snapshot_of([99_999], others, now=1.0), config).prefills) == len(others)


def test_of_those_deferred_only_one_holds_kv() -> None:
    views = [waiting(name, 5000, 2, slo=SLO(0.3 + number / 10, 1.0)) for number, name in enumerate("abcd")]
    found = admission_of(snapshot_of([99_999], views))
    assert [p.is_deferred for p in found.prefills] == [False] * (len(found.prefills) - 1) + [True]
    assert refused(found).keys() == {WaitReason.ONE_DEFERRED_AT_A_TIME}
    holding = replace(begun("x", 9000, 10, (0,)), slo=SLO(0.7, 1.0))
    found = admission_of(snapshot_of([99_999], [holding, *views]))
    assert [p.view.request_id for p in found.prefills if p.is_deferred] == ["x"]


def test_a_user_who_sends_much_is_due_later_and_nobody_else_is() -> None:
    many = [prompt(n, 1.0, 5.0, arrival=n / 10, user="many") for n in range(10)]
    one = prompt(10, 1.0, 5.0, arrival=2.0, user="one")
    fair = with_fair_deadlines([*many, one], now=3.0, speed=2.0, served={"many", "one"})
    assert [p.deadline for p in fair if p.view.user == "many"] == [max(5.0, 4.0 + n) for n in range(10)]
    assert one.deadline == 5.0


def test_a_user_of_whom_nothing_runs_is_due_when_an_equal_share_has_it_done() -> None:
    many = [prompt(n, 1.0, 5.0, arrival=n / 10, user="many") for n in range(10)]
    one = prompt(10, 1.0, 5.0, arrival=2.0, user="one")
    with_fair_deadlines([*many, one], now=3.0, speed=2.0, served={"many"})
    assert one.deadline == 4.0
    assert many[0].deadline == 5.0


def test_one_user_alone_shares_with_nobody() -> None:
    many = [prompt(n, 1.0, 5.0, user="many") for n in range(10)]
    with_fair_deadlines(many, now=3.0, speed=2.0, served=set())
    assert {p.deadline for p in many} == {5.0}


def of_user(user: str, requests: Iterable[Request]) -> list[Request]:
    return [replace(request, user=user) for request in requests]


@pytest.mark.parametrize("num_tokens", [300, 8000])
def test_a_user_with_one_request_is_not_delayed_by_one_with_a_hundred(num_tokens: int) -> None:
    many = of_user("many", [timed_request(n, 2500, 2) for n in range(100)])
    (one,) = of_user("one", [timed_request(500, num_tokens, 2, 0.05)])
    config = PolicyConfig(fairness=Fairness.USER)
    beside = simulate("esp", [500_000] * 4, [*many, one], config=config, cost_model=H200)
    alone = simulate("esp", [500_000] * 4, [one], config=config, cost_model=H200)
    unfair = simulate("esp", [500_000] * 4, [*many, one], cost_model=H200)
    assert beside.ttft(one) < 2 * config.step_time + 5 * alone.ttft(one)
    assert beside.ttft(one) < unfair.ttft(one) / 2


def test_equal_users_share_equally() -> None:
    users = "abcd"
    requests = [
        replace(timed_request(n, 3000, 4), user=users[n % 4 if n < 40 else 0]) for n in range(100)
    ]  # a has 70, the others 10 each
    run = simulate(
        "esp", [500_000] * 2, requests, config=PolicyConfig(fairness=Fairness.USER), cost_model=H200
    )
    last = {user: max(run.ttft(r) for r in requests if r.user == user) for user in users}
    assert max(last[user] for user in "bcd") < 0.6 * last["a"]


@st.composite
def tight_runs(draw: st.DrawFn) -> tuple[list[int], list[Request]]:
    """Return requests each of which fits the cluster, and far more of them than fit together."""
    capacities = draw(st.lists(st.integers(10, 60), min_size=1, max_size=4))
    most, requests = sum(capacities), []
    for number in range(draw(st.integers(4, 14))):
        num_prompt = draw(st.integers(1, most // 2))
        num_output = draw(st.integers(1, most - num_prompt + 1))
        requests.append(timed_request(number, num_prompt, num_output, draw(st.floats(0, 0.2))))
    return capacities, sorted(requests, key=lambda r: r.arrival_time)


@examples(5, thorough=80)
@given(tight_runs(), st.sampled_from([1, 4, 16]), st.sampled_from([0.01, 1.0, inf]))
def test_who_was_admitted_is_never_preempted(
    tight: tuple[list[int], list[Request]], lease_steps: int, target_ttft: float
) -> None:
    capacities, requests = tight
    config = PolicyConfig(lease_steps=lease_steps, target_ttft=target_ttft)
    assert simulate("esp", capacities, requests, config=config).stats.num_preemptions == 0


def num_overtaken(run: Run, request: Request, others: Iterable[Request]) -> int:
    """Return how many later requests began before it."""
    first = run.token_times[request.request_id][0]
    return sum(
        other.arrival_time > request.arrival_time and run.token_times[other.request_id][0] < first
        for other in others
    )


def test_a_request_that_needs_all_the_room_is_let_past_by_no_one_for_ever() -> None:
    large = timed_request(0, 900, 20, 0.1)
    small = [timed_request(n, 100, 60, n * 0.06) for n in range(1, 200)]
    run = simulate("esp", [500, 500], [*sorted([large, *small], key=lambda r: r.arrival_time)])
    assert 0 < num_overtaken(run, large, small) < 100
    assert run.ttft(large) < 6.0 < run.ttft(small[-1]) + small[-1].arrival_time
