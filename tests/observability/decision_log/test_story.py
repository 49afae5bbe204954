"""Stories of requests that meet with all that can happen."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from chaos import chaos
from decision_logs import EventReporter, host_tier, logged, prefill_two, reported
from examples import seeds
from msgspec import structs
from plans import decode, in_group, move, plannable, prefill
from simulation import instances_with, timed_request

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.events import (
    BatchFinished,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, Eviction, IterationPlan, LeaseEnd, LeaseExtension, Preemption
from loong.core.request import FinishReason, RequestView
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchEndedLine,
    Cause,
    EndedLine,
    ExtendedLease,
    FirstTokenLine,
    Line,
    PlannedLine,
)
from loong.observability.decision_log.log import FOLLOWING, decision_log
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.runs import RequestRun, RequestRuns
from loong.observability.decision_log.story import words
from loong.observability.decision_log.story.index import indexed
from loong.observability.decision_log.story.phrases import happenings
from loong.observability.decision_log.story.steps import ComputedBatches, Move, Wait
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.summary import Latency, summary_of
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

THREE = instances_with([20] * 3)


def story(log: Sequence[Line], request_id: str) -> str:
    """Return a story in one line, with single spaces."""
    return " ".join(words.reported(story_of(indexed(log), request_id)).split())


def tokens(batch_id: int, step: int, *request_ids: str, reason: FinishReason | None = None) -> TokensProduced:
    """Return a token of each, at second `step` of a batch that began at 10."""
    produced = tuple(ProducedToken(request_id, 5, reason) for request_id in request_ids)
    return TokensProduced(11.0 + step, batch_id, step, produced)


@pytest.mark.parametrize("seed", seeds(1, thorough=5))
def test_at_every_moment_a_request_waits_runs_or_moves(tmp_path: Path, seed: int) -> None:
    requests = [timed_request(n, 1 + 17 * n % 40, 1 + n % 7, 0.01 * n) for n in range(12)]
    instances = (*instances_with([90, 60, 40]), host_tier(3, 80))
    index = indexed(logged(tmp_path / "log", chaos(seed), instances, requests))
    for request_id in index.arrivals:
        reported_story = story_of(index, request_id)
        assert reported_story.summary.ended_at is not None
        spent, busy_until = reported_story.summary.waited_seconds, 0.0
        ended_at = reported_story.summary.ended_at
        for step in reported_story.steps:
            if isinstance(step, ComputedBatches):
                spent += sum(part.seconds for part in step.parts)
                busy_until = max(part.until or 0.0 for part in step.parts)
            elif isinstance(step, Move):  # perhaps while a batch reads what moves
                assert step.until is not None
                until = min(step.until, ended_at)  # it may end while its KV is still on its way
                spent += max(0.0, until - max(step.time, busy_until))
                busy_until = max(busy_until, until)
        assert spent == pytest.approx(ended_at - reported_story.summary.arrived_at)
        assert words.reported(reported_story)


def test_every_moment_without_kv_has_a_reason(tmp_path: Path) -> None:
    requests = [timed_request(n, 40 + 997 * n % 3000, 2 + n % 40, n * 4e-3) for n in range(30)]
    policy = make_policy("esp", PolicyConfig())
    index = indexed(logged(tmp_path / "log", policy, instances_with([4000] * 3), requests))
    waits = [step for r in index.arrivals for step in story_of(index, r).steps if isinstance(step, Wait)]
    assert len(waits) > len(requests) / 2
    for wait in waits:
        assert wait.until is not None
        assert sum(reason.seconds for reason in wait.waited_for) == pytest.approx(wait.until - wait.time)


def test_reasons_to_rest_are_summed_over_the_batches_of_a_run(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 9, 9)))
        for batch_id, (start, end) in enumerate(((0.0, 2.0), (4.0, 6.0), (9.0, 12.0)), 1):
            (view,) = reporter.state.snapshot(start).request.values()
            reporter.plan(start, IterationPlan((prefill([view], (0, 1), masters=(1,), num_tokens=2),)))
            reporter.report(BatchFinished(end, batch_id, 1))
            reporter.plan(end, wait("full" if batch_id > 1 else "busy"))
            reporter.plan(end + 0.5, wait("late"))

    def wait(reason: str) -> IterationPlan:
        return IterationPlan(decisions=(Decision(DecisionKind.WAIT, ("r000",), reason),))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "It rests twice before a batch, 5.00 s in all" in text
    assert "For 4.00 s: late. For 500 ms: busy. For 500 ms: full." in text
    assert "Its KV stays on instance 1, which computes it." in text


def test_equal_chunks_and_leases_are_reported_once_with_their_number(tmp_path: Path) -> None:
    policy = in_group(0, 1, chunk=10, num_steps=16)
    log = logged(tmp_path / "log", policy, instances_with([2000, 2000]), [timed_request(0, 995, 500)])
    text = story(log, "r000")
    assert "Prefill of 995 tokens (0 to 994) in 100 chunks of 5 to 10 on instances 0 and 1 (DoP 2" in text
    assert "Its KV stays on instances 0 and 1 (about 498 tokens each)." in text
    assert "Decode of 499 tokens in 32 leases on instances 0 and 1 (DoP 2)" in text
    assert len(text) < 1000


def test_a_queue_is_reported_with_who_is_in_it_and_what_they_need(tmp_path: Path) -> None:
    def one_by_one(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        """Latest first."""
        idle = snapshot.instance[0].is_idle
        views = sorted(
            plannable(snapshot), key=lambda view: (not view.placement.segments, -view.arrival_time)
        )
        return IterationPlan((_whole(views[0]),)) if idle and views else IterationPlan()

    requests = [timed_request(n, 30, 2, arrival_time=n * 1e-3) for n in range(4)]
    log = logged(tmp_path / "log", one_by_one, instances_with([70]), requests)
    text = story(log, "r002")
    assert "1 request waits before it: r001." in text
    assert "Instance 0 runs batch 1 (prefill of 1 request) until +0.038 s." in text
    room = "40 of 70 tokens of KV are free (up to 40 on one instance)"
    assert f"There is no room for all: {room}, the prompts before it need 30, and its own 30." in text
    assert "Having waited 100 ms, it starts as batch 4 ends. 70 tokens of KV are free by now." in text
    assert "r003, which came later, has started before it." in text


def test_one_that_starts_with_the_plan_for_its_arrival_does_not_wait_for_itself(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        for number in range(2):
            reporter.report(RequestArrived(0.0, timed_request(number, 6, 9)))
        views = reporter.state.snapshot(0.5).waiting
        reporter.plan(0.5, IterationPlan((prefill([views[0]], (0,)), prefill([views[1]], (1,)))))

    arrivals = (Cause("request_arrived", "r000"), Cause("request_arrived", "r001"))
    log = [
        structs.replace(line, causes=arrivals) if isinstance(line, PlannedLine) else line
        for line in reported(tmp_path / "log", THREE, script)
    ]
    for request_id in ("r000", "r001"):
        text = story(log, request_id)
        assert "Having waited 500 ms, it starts with the first plan after its arrival." in text


def _whole(view: RequestView) -> BatchPlan:
    return decode([view], (0,), {view.request_id: 0}) if view.is_decoding else prefill([view], (0,))


def test_who_never_starts_is_reported_why(tmp_path: Path) -> None:
    why = Decision(DecisionKind.WAIT, ("r000",), "no instance may take it")

    def refuse(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        return IterationPlan(decisions=(why,) if snapshot.waiting else ())

    request, abort = timed_request(0, 30, 2), RequestAborted(2.0, "r000")
    text = story(logged(tmp_path / "log", refuse, instances_with([20]), [request], aborts=[abort]), "r000")
    assert "It got no token." in text
    room = "20 of 20 tokens of KV are free (up to 20 on one instance)"
    assert f"There is no room for it: {room}, and its prompt needs 30." in text
    assert "It has waited 2.00 s, and never starts." in text
    assert text.count("For 2.00 s: no instance may take it.") == 1
    assert "Its client leaves, after 0 tokens." in text


def test_the_end_of_the_log_may_come_first(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=5),)))
        reporter.report(RequestArrived(2.5, timed_request(2, 6, 9, arrival_time=2.5)))
        reporter.report(RequestArrived(4.0, timed_request(3, 6, 9, arrival_time=4.0)))

    log = reported(tmp_path / "log", THREE, script)
    assert "on instances 0 and 1 (DoP 2): not done when the log ends." in story(log, "r000")
    assert "It still waits when the log ends, 1.50 s by then." in story(log, "r002")
    assert "Instances 0 and 1 run batch 3 (decode of 1 request). Instance 2 is idle." in story(log, "r002")


def test_the_end_of_the_log_may_come_within_a_row_of_leases(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(10.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=2),)))
        reporter.report(tokens(3, 0, "r000"))
        reporter.report(tokens(3, 1, "r000"))
        reporter.report(BatchFinished(12.0, 3, 2))
        first = reporter.state.snapshot(12.0).request["r000"]
        reporter.plan(12.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=2),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "Decode of 2 tokens in 2 leases on instances 0 and 1 (DoP 2): 1.00 s a token." in text
    assert "The last of these is not done when the log ends." in text


def test_a_batch_in_flight_is_busy_until_its_predicted_end(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        lease = decode([first], (0, 1), {"r000": 1}, num_steps=5)
        reporter.plan(2.0, IterationPlan((replace(lease, predicted_time=0.25),)))
        reporter.report(RequestArrived(2.5, timed_request(2, 6, 9, arrival_time=2.5)))

    text = story(reported(tmp_path / "log", THREE, script), "r002")
    assert "Instances 0 and 1 run batch 3 (decode of 1 request) until +0.750 s, as predicted." in text


def test_many_batches_are_reported_together(tmp_path: Path) -> None:
    def one_per_instance(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        idle = [i.instance_id for i in snapshot.instances if i.is_idle]
        pairs = zip([view for view in plannable(snapshot) if not view.is_decoding], idle, strict=False)
        return IterationPlan(tuple(prefill([view], (instance_id,)) for view, instance_id in pairs))

    requests = [timed_request(n, 10 + n, 1, arrival_time=n * 1e-3) for n in range(6)]
    text = story(logged(tmp_path / "log", one_per_instance, instances_with([50] * 6), requests), "r005")
    span = "the first until +0.015 s, the last until +0.023 s"
    assert f"Instances 0 to 4 run 5 batches (prefill of 5 requests), {span}. Instance 5 is idle." in text


def test_leases_cut_short_are_reported_with_the_cause(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(10.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=5),)))
        reporter.report(
            RequestArrived(10.5, timed_request(2, 6, 9)), IterationPlan(lease_ends=(LeaseEnd(3, 2),))
        )
        reporter.report(tokens(3, 0, "r000"))
        reporter.report(tokens(3, 1, "r000"))
        reporter.report(BatchFinished(12.0, 3, 2))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "Decode of 2 tokens in 1 lease on instances 0 and 1 (DoP 2): 1.00 s a token." in text
    assert "1 lease ends early: as r002 arrives." in text


@pytest.mark.parametrize(("num_steps", "is_cut"), [(7, False), (6, True)])
def test_a_lease_that_went_on_is_cut_short_only_if_it_took_fewer_steps_than_it_came_to_have(
    tmp_path: Path, num_steps: int, is_cut: bool
) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(10.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=5),)))
        extension = IterationPlan(lease_extensions=(LeaseExtension(3, 7),))
        reporter.report(tokens(3, 0, "r000"), extension)
        for step in range(1, 5):
            reporter.report(tokens(3, step, "r000"))
        reporter.report(
            RequestArrived(10.5, timed_request(2, 6, 9)), IterationPlan(lease_ends=(LeaseEnd(3, 6),))
        )
        for step in range(5, num_steps):
            reporter.report(tokens(3, step, "r000"))
        reporter.report(BatchFinished(12.0, 3, num_steps))

    log = reported(tmp_path / "log", THREE, script)
    planned = [line for line in log if isinstance(line, PlannedLine) and line.extended_leases]
    assert [line.causes for line in planned] == [(Cause("lease_ending", batch_id=3),)]
    assert planned[0].extended_leases == (ExtendedLease(3, 7),)
    text = story(log, "r000")
    assert f"Decode of {num_steps} tokens in 1 lease on instances 0 and 1" in text
    assert ("1 lease ends early: as r002 arrives." in text) == is_cut


def test_offloading_and_a_failed_move_are_reported(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, second = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan(migrations=(*move(first, 0, 3), *move(first, 1, 3))))
        reporter.plan(2.0, IterationPlan(migrations=move(second, 2, 0)))
        reporter.report(MigrationFinished(3.0, 3, is_committed=True))
        reporter.report(MigrationFinished(3.5, 4, is_committed=True))
        reporter.report(MigrationFinished(4.0, 5, is_committed=False))
        (first, second) = reporter.state.snapshot(4.0).running
        reporter.plan(5.0, IterationPlan(migrations=move(second, 2, 1)))

    log = reported(tmp_path / "log", (*THREE, host_tier(3, 50)), script)
    routes = "3 tokens from instance 0 to host tier 3 and 3 tokens from instance 1 to host tier 3"
    assert f"KV moves, {routes}, in 1.50 s." in story(log, "r000")
    other = story(log, "r001")
    assert "KV is to move, 6 tokens from instance 2 to instance 0, but that fails after 2.00 s" in other
    assert "KV moves, 6 tokens from instance 2 to instance 1; it is under way when the log ends." in other


def test_a_preemption_is_reported_with_the_room_and_who_takes_it(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        why = Decision(DecisionKind.PREEMPT, ("r000",), "r000, which came last")
        reporter.plan(2.0, IterationPlan(preemptions=(Preemption("r000"),), decisions=(why,)))
        reporter.report(RequestArrived(2.0, timed_request(2, 6, 9)))
        views = {view.request_id: view for view in reporter.state.snapshot(2.0).waiting}
        reporter.plan(2.0, IterationPlan((prefill([views["r002"]], (1,)),)))
        reporter.plan(3.0, IterationPlan((prefill([views["r000"]], (0,)),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    why = "It is preempted, as others need its room, and it came last."
    kv = "Its KV, 6 tokens on instances 0 and 1 (3 tokens each), is dropped, to be computed again"
    assert f"{why} {kv}. 48 of 60 tokens of KV were free; batch 3 starts there." in text
    assert "The policy on preemption: r000, which came last." in text
    assert "Having waited 1.00 s, it starts as the client of nobody leaves." in text
    assert "Prefill again of 7 tokens (0 to 6) in one chunk on instance 0" in text


def test_an_eviction_is_reported_with_what_stays_or_as_a_new_wait(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        for time, instance_id in ((2.0, 1), (3.0, 0)):
            why = Decision(DecisionKind.EVICT, ("r000",), f"instance {instance_id} is to leave")
            evicted = Eviction(KVSegment("r000", range(instance_id, 6, 2), instance_id))
            reporter.plan(time, IterationPlan(evictions=(evicted,), decisions=(why,)))
        (view,) = (v for v in reporter.state.snapshot(3.0).waiting if v.request_id == "r000")
        reporter.plan(4.0, IterationPlan((prefill([view], (2,)),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "KV on instance 1, 3 of its 6 tokens, is dropped, to be computed again." in text
    assert "KV on instance 0, 3 of its 3 tokens, is dropped, to be computed again." in text
    assert "The policy on dropping KV: instance 0 is to leave." in text
    assert "Having waited 1.00 s" in text


def test_a_paused_request_reports_what_ran_in_its_place(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, second = prefill_two(reporter)
        reporter.report(RequestArrived(1.0, timed_request(2, 6, 9)))
        (third,) = reporter.state.snapshot(1.0).waiting
        reporter.plan(1.0, IterationPlan((prefill([third], (1,)), decode([second], (2,), {"r001": 2}))))
        reporter.report(TokensProduced(3.0, 3, 0, (ProducedToken("r002", 5),)))
        reporter.report(BatchFinished(3.0, 3, 1))
        reporter.plan(3.0, IterationPlan((decode([first], (1, 0), {"r000": 1}),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "It rests once before a batch, 2.00 s in all, while batch 3 runs where its KV is." in text


@pytest.mark.parametrize(("lost_id", "is_hit"), [(1, True), (2, False)])
def test_a_lost_instance_is_reported_to_those_that_had_kv_there(
    tmp_path: Path, lost_id: int, is_hit: bool
) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceLost(2.0, lost_id, "it was silent"))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert ("is lost (it was silent), with 3 of 6 tokens of KV of this request" in text) == is_hit
    assert "It still waits when the log ends" not in text


def test_a_request_that_loses_all_its_kv_waits_again(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceLost(2.0, 0))
        reporter.report(InstanceLost(2.0, 1))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "Instance 1 is lost, with all KV of this request." in text
    assert "It still waits when the log ends" in text


def test_a_batch_that_loses_an_instance_is_cut_off(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan((decode([first], (0, 1, 2), {"r000": 1}, num_steps=5),)))
        reporter.report(InstanceLost(3.0, 2))
        resting = reporter.state.snapshot(3.0).request["r000"]
        reporter.plan(4.0, IterationPlan((decode([resting], (0, 1), {"r000": 1}),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "on instances 0, 1 and 2 (DoP 3): cut off." in text
    assert "Instance 2 is lost, with 0 of 6 tokens of KV of this request." in text
    assert "It rests once before a batch, 1.00 s in all" in text


@pytest.mark.parametrize(
    ("num_tokens", "said"),
    [(2, "Repair of 2 lost tokens on"), (4, "Repair of 2 lost tokens and prefill of 2 more on")],
)
def test_a_repair_is_told_from_a_prefill(tmp_path: Path, num_tokens: int, said: str) -> None:
    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)))
        reporter.plan(0.0, IterationPlan((prefill(reporter.state.snapshot(0.0).waiting, (0, 1)),)))
        reporter.report(TokensProduced(1.0, 1, 0, (ProducedToken("r000", 5),)))
        reporter.report(BatchFinished(1.0, 1, 1))
        reporter.report(InstanceLost(2.0, 1))
        (view,) = reporter.state.snapshot(2.0).running
        reporter.plan(2.0, IterationPlan((prefill([view], (0, 2), num_tokens=num_tokens),)))
        if num_tokens == 4:
            reporter.report(TokensProduced(3.0, 2, 0, (ProducedToken("r000", 5),)))
        reporter.report(BatchFinished(3.0, 2, 1))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "Instance 1 is lost, with 3 of 6 tokens of KV of this request." in text
    assert said in text
    assert "Having waited" not in text


def test_a_wait_tells_how_the_cluster_changed_meanwhile(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)))
        reporter.report(InstanceLost(1.0, 1, "it was killed", returns=True))
        reporter.report(InstanceDraining(2.0, 2))
        reporter.report(InstanceLeft(3.0, 2))
        reporter.report(InstanceJoined(4.0, THREE[1]))
        reporter.plan(5.0, IterationPlan((prefill(reporter.state.snapshot(5.0).waiting, (0, 1)),)))
        reporter.report(InstanceJoined(6.0, THREE[2]))

    log = reported(tmp_path / "log", THREE, script)
    changes = (
        "instance 1 is lost (it was killed), instance 2 is to leave, instance 2 leaves and instance 1 joins"
    )
    assert f"Meanwhile {changes}." in story(log, "r000")
    assert story(log, "r000").count("Meanwhile") == 1
    assert f"Meanwhile {changes}." in list(words.why_it_waited(story_of(indexed(log), "r000")))


def test_an_arrival_tells_which_instances_are_missing(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceDraining(2.0, 0))
        reporter.report(InstanceLost(2.0, 1, returns=True))
        reporter.report(RequestArrived(3.0, timed_request(2, 6, 9)))
        reporter.report(InstanceJoined(4.0, THREE[1]))
        reporter.report(RequestArrived(5.0, timed_request(3, 6, 9)))

    log = reported(tmp_path / "log", THREE, script)
    text = story(log, "r002")
    assert "Instance 2 is idle. Instance 0 is to leave, and takes nothing new." in text
    assert "Instance 1 is lost, and not back." in text
    assert "14 of 20 tokens of KV are free (up to 14 on one instance)" in text
    assert "not back" not in story(log, "r003")


def test_a_request_is_told_that_an_instance_with_its_kv_is_to_leave(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceDraining(2.0, 1))
        reporter.report(InstanceDraining(3.0, 2))

    log = reported(tmp_path / "log", THREE, script)
    assert "Instance 1 is to leave: 3 of 6 tokens of this request's KV must go elsewhere." in story(
        log, "r000"
    )
    assert "Instance 2" not in story(log, "r000").split("Its first token,")[1]
    assert "Instance 2 is to leave: all of this request's KV must go elsewhere." in story(log, "r001")


def test_a_part_of_a_prompt_whose_kv_was_lost_is_prefilled_again(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)))
        (view,) = reporter.state.snapshot(0.0).waiting
        reporter.plan(0.0, IterationPlan((prefill([view], (0,), num_tokens=4),)))
        reporter.report(BatchFinished(1.0, 1, 1))
        reporter.report(InstanceLost(2.0, 0))
        (view,) = reporter.state.snapshot(2.0).waiting
        reporter.plan(3.0, IterationPlan((prefill([view], (1,), num_tokens=5),)))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert "Prefill of 4 tokens (0 to 3)" in text
    assert "Instance 0 is lost, with all KV of this request." in text
    assert "4 tokens are to be computed again." in text
    assert "Prefill again of 5 tokens (0 to 4)" in text


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.STOP, "Its answer is complete, after 2 tokens."),
        (FinishReason.ERROR, "It fails, after 2 tokens."),
    ],
)
def test_every_end_is_reported(tmp_path: Path, reason: FinishReason, said: str) -> None:
    def script(reporter: EventReporter) -> None:
        first, second = prefill_two(reporter)
        both = decode([first, second], (0, 1, 2), {"r000": 1, "r001": 2}, num_steps=5)
        reporter.plan(10.0, IterationPlan((both,)))
        reporter.report(tokens(3, 0, "r000", reason=reason))

    text = story(reported(tmp_path / "log", THREE, script), "r000")
    assert (
        "Decode of 1 token in 1 lease on instances 0, 1 and 2 (DoP 3), with 1 other request: 1.00 s" in text
    )
    assert "Scale-up: instance 2 joins the group, for which no KV moves." in text
    assert said in text


@pytest.mark.parametrize(
    ("reason", "said", "cause"),
    [
        (FinishReason.STOP, "Its answer is complete, after 2 tokens.", "the answer to r000 is complete"),
        (FinishReason.ERROR, "It fails, after 2 tokens.", "r000 fails"),
        (FinishReason.ABORT, "Its client leaves, after 2 tokens.", "the client of r000 leaves"),
    ],
)
def test_only_a_client_that_left_is_said_to_leave(
    tmp_path: Path, reason: FinishReason, said: str, cause: str
) -> None:
    def script(reporter: EventReporter) -> None:
        first, second = prefill_two(reporter)
        both = decode([first, second], (0, 1, 2), {"r000": 1, "r001": 2}, num_steps=5)
        reporter.plan(10.0, IterationPlan((both,)))
        reporter.report(tokens(3, 0, "r000"))
        reporter.report(tokens(3, 0, "r001"))
        aborted = RequestAborted(11.0, "r000", reason)
        reporter.report(aborted, IterationPlan(lease_ends=(LeaseEnd(3, 2),)))

    log = reported(tmp_path / "log", THREE, script)
    assert said in story(log, "r000")
    (ended,) = (line for line in log if isinstance(line, EndedLine))
    assert (ended.reason, ended.num_output_tokens) == (reason.value, 2)
    plans = [line for line in log if isinstance(line, PlannedLine)]
    assert happenings(plans[-1].causes) == cause


def test_a_request_on_a_real_clock_is_reported_with_the_date(tmp_path: Path) -> None:
    with decision_log(tmp_path / "log", clock_start=86400.0) as log:
        EventReporter(log, THREE).report(RequestArrived(1.0, timed_request(0, 6, 9, arrival_time=1.0)))
    text = story(read_log(tmp_path / "log"), "r000")
    assert "It came at 1.000 s of the run, 1970-01-02 00:00:01 UTC." in text


def test_names_that_clients_give_themselves_do_nothing_to_terminals() -> None:
    log = [ArrivedLine(1.0, "r", 4, 9, instances=(), user=name) for name in ("Zoë", "\x1b[2J")]
    assert "Request r of user Zoë:" in story(log[:1], "r")
    assert r"Request r of user '\x1b[2J':" in story(log[1:], "r")


def test_a_first_token_that_takes_no_time_is_in_time() -> None:
    log = (
        ArrivedLine(1.0, "r", num_prompt_tokens=4, max_tokens=9, instances=(), ttft_slo=2.0),
        FirstTokenLine(1.0, "r"),
        EndedLine(9.0, "r", FinishReason.LENGTH, num_output_tokens=9),
    )
    assert story_of(indexed(log), "r").summary.ttft == Latency(0.0, 2.0, is_late=False)


def test_a_choice_begins_with_the_prompt_that_another_has_computed(tmp_path: Path) -> None:
    request = replace(timed_request(0, 20, 6), num_choices=2)
    log = logged(tmp_path / "log", in_group(0, 1, chunk=10), THREE, [request])
    reported_story = story(log, "r000-1")
    assert "It comes as another choice of r000, which computes the prompt of both." in reported_story
    assert "It never waited" in reported_story
    assert "Prefill" not in reported_story
    assert "Decode of 5 tokens" in reported_story
    assert "Prefill of 20 tokens" in story(log, "r000")


def test_a_wait_for_a_grammar_is_named() -> None:
    plain = ArrivedLine(1.0, "r", num_prompt_tokens=4, max_tokens=9, instances=())
    compiled = "Workers compile its grammar for 1.250 s, and no plan has it before."
    assert compiled in story([msgspec.structs.replace(plain, grammar_seconds=1.25)], "r")
    assert "grammar" not in story([plain], "r")


def test_nothing_is_reported_the_time_before_a_request_came(tmp_path: Path) -> None:
    policy = make_policy("esp", PolicyConfig())
    index = indexed(logged(tmp_path / "log", policy, THREE, [timed_request(0, 9, 2, 0.5)]))
    reported_story = story_of(index, "r000")
    summary = structs.replace(reported_story.summary, arrived_at=reported_story.summary.arrived_at + 1e-6)
    late = structs.replace(reported_story, summary=summary)
    assert [time for time, _ in words.chapters(late)][:2] == [0.0, 0.0]


def test_a_batch_lasts_as_long_as_its_workers_measured_however_late_reports_are_read(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(1.0, timed_request(0, 4, 3, arrival_time=1.0)))
        (view,) = reporter.state.snapshot(1.0).waiting
        reporter.plan(2.0, IterationPlan((replace(prefill([view], (0,)), predicted_time=0.25),)))
        reporter.report(TokensProduced(2.0, 1, 0, (ProducedToken("r000", 5),)))
        reporter.report(BatchFinished(2.00007, 1, 1, seconds=0.25))

    log = reported(tmp_path / "log", THREE, script)
    assert BatchEndedLine(2.00007, 1, 1, seconds=0.25, predicted_seconds=0.25) in log
    on = "in one chunk on instance 0 (DoP 1 of 3 idle)"
    assert f"Prefill of 4 tokens (0 to 3) {on}: 250 ms, as predicted." in story(log, "r000")
    assert summary_of(indexed(log), "r000").measured_seconds == 0.25


def test_a_prompt_that_others_computed_is_read_on_the_instances_that_have_it(tmp_path: Path) -> None:
    requests = [timed_request(n, 40, 3, time) for n, time in enumerate((0.0, 0.0, 9.0))]
    policy = make_policy("esp", PolicyConfig())
    log = logged(tmp_path / "log", policy, instances_with([200]), requests, keeps_prefixes=True)
    assert "prefix cache" not in story(log, "r000")
    assert [summary_of(indexed(log), r).num_cached_tokens for r in ("r000", "r001", "r002")] == [0, 39, 39]
    assert FOLLOWING in story(log, "r001")
    assert "Not read" not in " ".join(story(log, r) for r in ("r000", "r001", "r002"))
    for request_id in ("r001", "r002"):
        assert "39 tokens are in the prefix cache, on instance 0. Prefill of 1 token (39 to 39)" in story(
            log, request_id
        )


def test_it_is_said_why_less_was_read_than_there_could_be(tmp_path: Path) -> None:
    policy = make_policy("esp", PolicyConfig())
    salts = [(40, ""), (50, "x"), (90, "y"), (40, "")]
    requests = [
        replace(timed_request(n, num_tokens, 3, 9.0 * n), cache_salt=salt)
        for n, (num_tokens, salt) in enumerate(salts)
    ]
    log = logged(tmp_path / "log", policy, instances_with([100]), requests, keeps_prefixes=True)
    not_read = "Not read from the prefix cache:"
    assert not_read not in story(log, "r000")
    assert re.search(rf"{not_read} its first \d+ tokens are there for another salt.", story(log, "r001"))
    assert re.search(
        rf"{not_read} 39 tokens from token 0 on, evicted .* s ago to make room.", story(log, "r003")
    )


def test_runs_count_what_a_request_read_as_it_began(tmp_path: Path) -> None:
    over: list[RequestRun] = []
    runs = RequestRuns([over.append])
    requests = [timed_request(n, 40, 3, 9.0 * n) for n in range(2)]
    policy = make_policy("esp", PolicyConfig())
    for line in logged(tmp_path / "log", policy, instances_with([200]), requests, keeps_prefixes=True):
        runs(line, b"")
    assert [(run.request_id, run.num_cached_tokens) for run in over] == [("r000", 0), ("r001", 39)]


@pytest.mark.parametrize("seed", seeds(1, thorough=5))
def test_stories_hold_together_when_requests_share_what_they_compute(tmp_path: Path, seed: int) -> None:
    requests = [timed_request(n, 1 + 17 * n % 40, 1 + n % 7, 0.01 * n) for n in range(12)]
    instances = instances_with([90, 60, 40])
    index = indexed(logged(tmp_path / "log", chaos(seed), instances, requests, keeps_prefixes=True))
    assert any(batch.cached for _, batch in index.batches.values())
    for request_id in index.arrivals:
        assert words.reported(story_of(index, request_id))
