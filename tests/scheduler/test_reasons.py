"""Every decision says why: each prompt that comes begins with its alternatives, or is told why it waits."""

from dataclasses import replace

import pytest
from machines import H200, H200_CAPACITY
from plans import decode
from simulation import simulate, timed_request
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.cost_model import prefill_time
from loong.core.decision import Decision, DecisionKind
from loong.core.request import SLO
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.dispatch import MAX_REFUSED, Dispatch, by_deadline
from loong.scheduler.esp import plan_esp
from loong.scheduler.reasons import reasons_to_preempt, reasons_to_wait
from loong.scheduler.survey import survey


def decided(snapshot: Snapshot, config: PolicyConfig | None = None) -> list[Decision]:
    return list(plan_esp(snapshot, H200, config or PolicyConfig()).decisions)


def reason_for(request_id: str, decisions: list[Decision], kind: DecisionKind = DecisionKind.WAIT) -> str:
    (reason,) = (d.chosen for d in decisions if d.request_ids == (request_id,) and d.kind is kind)
    return reason


@pytest.mark.parametrize("num_instances", [1, 2, 4, 8])
def test_a_prompt_that_begins_is_told_its_dop_and_what_others_would_have_taken(num_instances: int) -> None:
    (decision,) = decided(snapshot_of([H200_CAPACITY] * num_instances, [waiting("p", 200_000)]))
    assert decision.kind is DecisionKind.DOP
    assert decision.chosen == ("1 instance" if num_instances == 1 else f"{num_instances} instances")
    expected = [dop for dop in (1, 2, 4, 8) if dop <= num_instances]
    assert [alternative.cost for alternative in decision.alternatives] == [
        prefill_time(H200, 200_000, 0, dop) for dop in expected
    ]
    assert decision.alternatives[0].what == "1 instance"


def test_a_dop_that_is_not_a_power_of_two_is_among_the_alternatives() -> None:
    views = [waiting("p", 200_000)]
    (decision,) = decided(snapshot_of([H200_CAPACITY] * 8, views, recent_prompt_lengths=(10,)))
    assert decision.chosen == "6 instances"
    assert [a.what for a in decision.alternatives] == [
        "1 instance",
        "2 instances",
        "4 instances",
        "6 instances",
        "8 instances",
    ]


def test_a_prompt_that_waits_is_told_for_which_instances_and_for_how_long() -> None:
    view = decoding("busy", 100, (1,))
    plan = replace(decode([view], (1,), {"busy": 1}), predicted_time=0.004)
    snapshot = snapshot_of([999, 999], [view, waiting("p", 1500)], [running(0, plan)])
    expected = "it waits for instances 0, 1; the last of them is free in 0.004 s"
    assert reason_for("p", decided(snapshot)) == expected


def test_a_prompt_without_room_is_told_both_numbers() -> None:
    snapshot = snapshot_of([60, 40], [decoding("d", 60, (0,), 11), waiting("p", 40, 11)])
    assert reason_for("p", decided(snapshot)) == (
        "with it, requests would come to need more KV than there is: 119 slots, of which there are 100"
    )


def test_those_behind_several_without_room_are_not_told_numbers() -> None:
    views = [waiting(f"a{n}", 300 - n, 2, slo=SLO(1.0, 1.0)) for n in range(MAX_REFUSED)]
    decisions = decided(snapshot_of([100], [*views, waiting("z", 1, 2, slo=SLO(2.0, 1.0))]))
    assert reason_for("z", decisions) == "several before it wait for room"
    assert "slots, of which there are 100" in reason_for("a0", decisions)


def test_a_prompt_whose_slots_others_need_is_told_so() -> None:
    near, far = decoding("near", 49, (0,), 5), decoding("far", 19, (1,), 62)
    ahead = decode([far], (1,), {"far": 1}, num_steps=12)
    snapshot = snapshot_of([53, 31], [near, far, waiting("p", 10, 1)], [running(0, ahead)])
    assert reason_for("p", decided(snapshot)) == "others need the slots that it would take to end"


def test_one_that_is_put_off_is_told_its_work_and_waits_if_another_has_begun() -> None:
    views = [waiting(name, 60_000, slo=SLO(ttft, 1.0)) for name, ttft in (("a", 4.0), ("b", 4.1), ("c", 4.2))]
    decisions = decided(snapshot_of([H200_CAPACITY], views))
    expected = "it is put off: its 2.882 instance-seconds would make others late"
    assert reason_for("a", decisions, DecisionKind.DISPATCH) == expected
    assert reason_for("b", decisions) == "it is put off, as another is that has begun"


def test_a_prompt_that_finds_the_step_full_waits_for_the_next() -> None:
    views = [waiting(f"p{n}", 4000, slo=SLO(1.0 + n, 1.0)) for n in range(4)]
    decisions = decided(snapshot_of([H200_CAPACITY], views))
    assert reason_for("p3", decisions).startswith("it waits for the next step")


def test_a_prompt_that_is_given_no_instances_waits_for_room() -> None:
    found = survey(snapshot_of([999], [waiting("p", 30)]))
    dispatched = Dispatch(found, H200, PolicyConfig(), by_deadline).dispatch()
    (decision,) = reasons_to_wait(found, dispatched, [], set())
    assert decision.chosen == "it waits for room: no instances that it could have now have enough"


def test_only_those_that_have_just_come_are_told_again() -> None:
    view = waiting("p", 5000, 11)
    snapshot = snapshot_of([100], [view], now=0.5)
    assert decided(snapshot) == []
    assert decided(replace(snapshot, now=0.0)) != []


def test_who_is_preempted_is_told_what_lacks_and_who_else_holds_kv() -> None:
    first, last = decoding("first", 50, (0,)), decoding("last", 30, (0,))
    (decision,) = reasons_to_preempt(last, [first, last], 1)
    assert decision.kind is DecisionKind.PREEMPT
    assert decision.chosen.startswith("1 slots are free")
    assert [(a.what, a.cost) for a in decision.alternatives] == [
        ("preempt first", 50.0),
        ("preempt last", 30.0),
    ]


def test_every_prompt_that_comes_begins_or_is_told_why_it_waits() -> None:
    requests = [timed_request(n, 40 + 997 * n % 3000, 2 + n % 40, n * 4e-3) for n in range(80)]
    run = simulate("esp", [4000] * 3, requests, cost_model=H200)
    kinds = set()
    for snapshot, plan in run.plans:
        if not any(unit.is_ready or unit.is_in_lease for unit in survey(snapshot).units):
            continue  # nothing can be decided before a step has ended
        told = {request_id for decision in plan.decisions for request_id in decision.request_ids}
        kinds |= {decision.kind for decision in plan.decisions}
        assert {view.request_id for view in snapshot.waiting if view.arrival_time == snapshot.now} <= told
    assert kinds >= {DecisionKind.DOP, DecisionKind.WAIT}


def test_the_same_thing_is_not_said_twice() -> None:
    requests = [timed_request(n, 40 + 997 * n % 3000, 2 + n % 40, n * 4e-3) for n in range(80)]
    run = simulate("esp", [4000] * 3, requests, cost_model=H200)
    said = [d.request_ids for _, plan in run.plans for d in plan.decisions if d.kind is DecisionKind.DOP]
    assert len(said) == len(set(said)) == len(requests)
