"""Every decision has a reason: prompts that go on have alternatives, waiting prompts a reason to wait."""

import re
from dataclasses import replace

import pytest
from machines import H200, H200_CAPACITY
from plans import decode, prefill
from simulation import simulate, timed_request
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.cost.cost_model import prefill_time
from loong.core.decision import Decision, DecisionKind
from loong.core.request import SLO
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import plan_esp
from loong.scheduler.esp.reasons import JOINED, WaitReason, reason_to_preempt
from loong.scheduler.esp.stages import is_any_usable


def decided(snapshot: Snapshot, config: PolicyConfig | None = None) -> list[Decision]:
    return list(plan_esp(snapshot, H200, config or PolicyConfig()).decisions)


def wait_of(request_id: str, decisions: list[Decision]) -> str:
    """Return the one thing that a request is said to wait for."""
    (wait,) = (d.chosen for d in decisions if d.kind is DecisionKind.WAIT and request_id in d.request_ids)
    return wait


@pytest.mark.parametrize(
    ("num_instances", "dop", "expected"), [(1, 1, [1]), (2, 2, [1, 2]), (8, 7, [1, 2, 4, 7, 8])]
)
def test_a_prompt_that_begins_is_reported_its_dop_and_what_others_would_have_taken(
    num_instances: int, dop: int, expected: list[int]
) -> None:
    (decision,) = decided(snapshot_of([H200_CAPACITY] * num_instances, [waiting("p", 200_000)]))
    assert decision.kind is DecisionKind.DOP
    assert decision.chosen == ("1 instance" if dop == 1 else f"{dop} instances")
    assert [alternative.cost for alternative in decision.alternatives] == [
        prefill_time(H200, 200_000, 0, dop) for dop in expected
    ]
    assert decision.alternatives[0].what == "1 instance"


def test_the_alternatives_are_those_of_the_whole_cluster() -> None:
    taken = replace(decode([busy := decoding("busy", 100, (0,))], (0,), {"busy": 0}), predicted_time=9.0)
    views = [busy, waiting("p", 400), waiting("q", 300)]
    decisions = decided(snapshot_of([H200_CAPACITY] * 4, views, [running(0, taken)]))
    whats = {d.request_ids: [a.what for a in d.alternatives] for d in decisions if d.kind is DecisionKind.DOP}
    assert whats["p",] == [
        "1 instance, as all of it fits into one step there",
        "2 instances, 1 of them in another part of the cluster",
        "4 instances, 3 of them in another part of the cluster",
    ]


def test_a_prompt_that_goes_on_is_reported_its_dop_where_that_grows() -> None:
    def dops(num_holders: int) -> list[str]:
        view = begun("p", 200_000, 1000, tuple(range(num_holders)))
        snapshot = snapshot_of([H200_CAPACITY] * 4, [view])
        return [d.chosen for d in decided(snapshot) if d.kind is DecisionKind.DOP]

    assert (dops(2), dops(4)) == (["4 instances"], [])


def test_a_prompt_that_waits_is_reported_for_which_instances() -> None:
    view = decoding("busy", 100, (1,))
    plan = replace(decode([view], (1,), {"busy": 1}, num_steps=9), predicted_time=0.004)
    decisions = decided(snapshot_of([999, 999], [view, waiting("p", 1500)], [running(0, plan)]))
    assert wait_of("p", decisions) == WaitReason.BUSY
    (ended,) = (d for d in decisions if d.kind is DecisionKind.END_LEASE)
    assert (ended.request_ids, ended.chosen) == (("busy",), JOINED)


def test_prompts_that_wait_for_the_same_thing_are_reported_together() -> None:
    views = [waiting(f"a{n}", 300 - n, 2, slo=SLO(1.0, 1.0)) for n in range(4)]
    decisions = decided(snapshot_of([400], [decoding("d", 200, (0,), 99), *views]))
    assert {decision.chosen: decision.request_ids for decision in decisions} == {
        WaitReason.NO_ROOM: ("a0", "a1", "a2", "a3"),
    }


def test_those_whose_slots_others_need_are_reported() -> None:
    near, far = decoding("near", 49, (0,), 5), decoding("far", 19, (1,), 62)
    ahead = decode([far], (1,), {"far": 1}, num_steps=12)
    snapshot = snapshot_of([53, 31], [near, far, waiting("p", 10, 1)], [running(0, ahead)])
    assert wait_of("p", decided(snapshot)) == "free slots are kept for others, so that these can end"


def test_one_that_is_deferred_is_reported_whether_it_begins_or_not() -> None:
    views = [waiting(name, 60_000, slo=SLO(ttft, 1.0)) for name, ttft in (("a", 4.0), ("b", 4.1), ("c", 4.2))]
    decisions = decided(snapshot_of([H200_CAPACITY], views))
    (deferred,) = (d for d in decisions if d.kind is DecisionKind.DEFER)
    assert deferred.request_ids == ("a",)
    assert deferred.chosen == f"{WaitReason.DEFERRED_BY_DEADLINE}; it gets what they leave of each step"
    assert wait_of("b", decisions) == WaitReason.ONE_DEFERRED_AT_A_TIME


def test_one_that_is_deferred_and_finds_its_instance_busy_is_reported_that_it_is_deferred() -> None:
    views = [waiting(name, 60_000, slo=SLO(ttft, 1.0)) for name, ttft in (("a", 4.0), ("b", 4.1), ("c", 4.2))]
    lease = decode([busy := decoding("busy", 9, (0,))], (0,), {"busy": 0}, num_steps=9)
    decisions = decided(snapshot_of([H200_CAPACITY], [busy, *views], [running(0, lease)]))
    assert wait_of("a", decisions) == WaitReason.DEFERRED_BY_DEADLINE
    assert wait_of("c", decisions) == WaitReason.BUSY


def test_a_prompt_that_comes_among_many_decodes_is_reported_that_they_go_on_first() -> None:
    decodes = [decoding(f"d{n}", 9, (0,)) for n in range(600)]
    decisions = decided(snapshot_of([H200_CAPACITY], [*decodes, waiting("p", 9)]))
    assert wait_of("p", decisions) == WaitReason.BUSY


def test_a_prompt_that_finds_the_step_full_is_reported() -> None:
    views = [waiting(f"p{n}", 4000, slo=SLO(1.0 + n, 1.0)) for n in range(4)]
    decisions = decided(snapshot_of([H200_CAPACITY], views))
    assert wait_of("p3", decisions) == WaitReason.FULL_STEP


def test_those_that_come_during_steps_that_cannot_end_early_are_reported() -> None:
    first, old, new = (waiting(name, 5, arrival_time=at) for name, at in (("a", 0.0), ("b", 1.0), ("c", 3.0)))
    batch = running(0, prefill([first], (0,)), started_at=2.0)
    (decision,) = decided(snapshot_of([99], [first, old, new], [batch], now=4.0))
    assert (decision.kind, decision.request_ids) == (DecisionKind.WAIT, ("c",))
    assert decision.chosen == WaitReason.BUSY


def test_who_is_preempted_is_reported_what_lacks_and_why_it_is_the_one() -> None:
    decision = reason_to_preempt(decoding("last", 30, (0,)), num_holders=2, num_free=1)
    assert (decision.kind, decision.alternatives) == (DecisionKind.PREEMPT, ())
    assert decision.chosen == (
        "too few slots are free (1) for a step of those before it, "
        "and of 2 requests that hold KV it came last"
    )


def test_every_prompt_that_comes_or_rests_goes_on_or_is_reported_why_it_waits() -> None:
    requests = [timed_request(n, 40 + 997 * n % 3000, 2 + n % 40, n * 4e-3) for n in range(80)]
    run = simulate("esp", [4000] * 3, requests, cost_model=H200)
    kinds, explained, num_busy = set(), set[str](), 0
    for snapshot, plan in run.plans:
        reported = {request_id for decision in plan.decisions for request_id in decision.request_ids}
        kinds |= {decision.kind for decision in plan.decisions}
        explained |= reported.union(*(batch.request_ids for batch in plan.batches))
        unfinished = {view.request_id for view in (*snapshot.waiting, *make_planning_view(snapshot).begun)}
        num_busy += not is_any_usable(snapshot, snapshot.pools)
        assert unfinished <= explained
    assert num_busy
    assert kinds >= {DecisionKind.DOP, DecisionKind.WAIT, DecisionKind.END_LEASE}


def test_a_dop_is_said_of_each_prompt_that_begins_and_then_only_where_it_grows() -> None:
    requests = [timed_request(n, 40 + 997 * n % 3000, 2 + n % 40, n * 4e-3) for n in range(80)]
    reported = set[str]()
    for snapshot, plan in simulate("esp", [4000] * 3, requests, cost_model=H200).plans:
        for decision in (d for d in plan.decisions if d.kind is DecisionKind.DOP):
            (request_id,) = decision.request_ids
            dop = int(decision.chosen.split()[0])
            assert dop > len(snapshot.request[request_id].placement.instance_ids)
            assert decision.chosen in [alternative.what for alternative in decision.alternatives]
            reported.add(request_id)
    assert reported == {request.request_id for request in requests}


def test_a_dop_is_of_the_instances_that_compute_the_prompt_and_why_one_suffices() -> None:
    requests = [timed_request(n, (300, 6000, 60_000)[n % 3] + 37 * n, 60, n * 0.05) for n in range(60)]
    config = PolicyConfig(target_tpot=0.0115)
    of_batch, obstacles, num_slower = 0, set[str](), 0
    for snapshot, plan in simulate(
        "esp", [H200_CAPACITY] * 4, requests, cost_model=H200, config=config
    ).plans:
        for decision in (d for d in plan.decisions if d.kind is DecisionKind.DOP):
            request_id, *others = decision.request_ids
            (batch,) = (batch for batch in plan.batches if request_id in batch.request_ids)
            if others or decision.chosen.startswith("decodes"):
                continue
            blocks = batch.blocks_of(request_id)
            masters = {block.master_id for block in blocks}
            num_left = snapshot.request[request_id].num_uncomputed_tokens
            is_whole = sum(len(block.positions) for block in blocks) == num_left
            words = "1 instance" if len(masters) == 1 else f"{len(masters)} instances"
            if len(masters) < batch.group.dop:
                words += f" of the batch's {batch.group.dop}"
                of_batch += 1
            costs = {alternative.what: alternative.cost for alternative in decision.alternatives}
            if len(masters) == 1 and is_whole and costs[decision.chosen] > min(costs.values()):
                words += ", as all of it fits into one step there"
                num_slower += 1
            assert decision.chosen == words
            obstacles.update(re.findall("of them (.+)", "\n".join(costs)))
    assert of_batch
    assert num_slower
    assert obstacles == {"taken", "for decodes"}
