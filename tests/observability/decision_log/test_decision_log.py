"""The lines of a run's decision log."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from chaos import chaos
from decision_logs import EventReporter, clock, host_tier, logged, prefill_two, reported
from examples import seeds
from plans import both, decode, in_group, move, prefill
from simulation import instances_with, timed_request

from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.events import (
    BatchFinished,
    InstanceJoined,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.placement import KVSegment
from loong.core.plan import Eviction, Failure, IterationPlan, LeaseEnd, Preemption
from loong.core.request import SLO, FinishReason
from loong.observability.decision_log import lines
from loong.observability.decision_log.lines import Cause, Chunk, Decode, InstanceState, Line
from loong.observability.decision_log.log import decision_log
from loong.observability.decision_log.reader import read_log
from loong.state.cluster_state import ClusterState

T = TypeVar("T", bound=Line)


def of_kind(kind: type[T], log: tuple[Line, ...]) -> list[T]:
    return [line for line in log if isinstance(line, kind)]


def test_a_run_of_one_request_reads_like_this(tmp_path: Path) -> None:
    request = replace(timed_request(0, 4, 3, arrival_time=1.0), slo=SLO(2.0, 0.5), user="u")
    policy = in_group(1, 0, keep_on=(0,), masters=(0,), num_steps=8)
    log = logged(
        tmp_path / "log", policy, instances_with([9, 8]), [request], cost_model=clock(step=0.25, token=0.125)
    )
    empty = (InstanceState(0, 0, 9), InstanceState(1, 0, 8))
    filled = (InstanceState(0, 4, 9), InstanceState(1, 0, 8))
    first = lines.LoggedBatch(1, (1, 0), 2, chunks=(Chunk("r000", 0, 4, {1: 2, 0: 2}, {0: 4}),))
    lease = lines.LoggedBatch(2, (1, 0), 2, decodes=(Decode("r000", 4, 0),), num_steps=8)
    assert log == (
        lines.StartedLine(lines.VERSION),
        lines.ArrivedLine(1.0, "r000", 4, 3, empty, ttft_slo=2.0, tpot_slo=0.5, user="u"),
        lines.PlannedLine(1.0, (Cause("request_arrived", request_id="r000"),), empty, batches=(first,)),
        lines.BatchStartedLine(1.0, 1),
        lines.FirstTokenLine(1.5, "r000"),
        lines.BatchEndedLine(1.5, 1, num_steps=1, seconds=0.5),
        lines.PlannedLine(1.5, (Cause("batch_finished", batch_id=1),), filled, batches=(lease,)),
        lines.BatchStartedLine(1.5, 2),
        lines.EndedLine(2.25, "r000", FinishReason.LENGTH, num_output_tokens=3),
        lines.BatchEndedLine(2.25, 2, num_steps=2, seconds=0.375),
    )


def test_a_request_that_leaves_as_soon_as_it_comes_is_reported_to_arrive_and_to_end(tmp_path: Path) -> None:
    state, path = ClusterState(instances_with([9])), tmp_path / "log"
    events = RequestArrived(1.0, timed_request(0, 4, 3, arrival_time=1.0)), RequestAborted(1.5, "r000")
    with decision_log(path) as log:
        for event in events:
            log.on_event(event, state.apply(event))
        log.on_plan(events, state.snapshot(1.5), IterationPlan(), ())
    assert read_log(path)[1:] == (
        lines.ArrivedLine(1.0, "r000", 4, 3, (InstanceState(0, 0, 9),)),
        lines.EndedLine(1.5, "r000", FinishReason.ABORT, num_output_tokens=0),
    )


@pytest.mark.parametrize("seed", seeds(2, thorough=8))
def test_every_run_is_reported_from_each_arrival_to_each_end(tmp_path: Path, seed: int) -> None:
    requests = [timed_request(n, 1 + 17 * n % 40, 1 + n % 7, 0.01 * n) for n in range(12)]
    instances = (*instances_with([90, 60, 40]), host_tier(3, 80))
    log = logged(tmp_path / "log", chaos(seed), instances, requests)
    ids = [request.request_id for request in requests]
    assert [line.request_id for line in of_kind(lines.ArrivedLine, log)] == ids
    assert sorted(line.request_id for line in of_kind(lines.FirstTokenLine, log)) == ids
    lengths = {request.request_id: request.sampling_params.max_tokens for request in requests}
    assert {line.request_id: line.num_output_tokens for line in of_kind(lines.EndedLine, log)} == lengths
    plans = of_kind(lines.PlannedLine, log)
    on_plan = [batch.batch_id for plan in plans for batch in plan.batches]
    assert sorted(on_plan) == sorted(line.batch_id for line in of_kind(lines.BatchEndedLine, log))
    migrated = [migration.migration_id for plan in plans for migration in plan.migrations]
    assert sorted(migrated) == sorted(line.migration_id for line in of_kind(lines.MigrationEndedLine, log))
    assert [plan.time for plan in plans] == sorted(plan.time for plan in plans)


@pytest.mark.parametrize("seed", seeds(2, thorough=8))
def test_chunks_keep_what_they_compute(tmp_path: Path, seed: int) -> None:
    requests = [timed_request(n, 40, 3) for n in range(4)]
    log = logged(tmp_path / "log", chaos(seed), instances_with([90, 60, 40]), requests)
    chunks = [c for plan in of_kind(lines.PlannedLine, log) for batch in plan.batches for c in batch.chunks]
    assert chunks
    for chunk in chunks:
        assert sum(chunk.computed_on.values()) == sum(chunk.kept_on.values()) == chunk.num_tokens


def test_a_migration_has_a_line_when_planned_and_one_when_over(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan(migrations=move(first, 1, 2)))
        reporter.report(MigrationFinished(2.5, 3, is_committed=False))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    (plan,) = (plan for plan in of_kind(lines.PlannedLine, log) if plan.migrations)
    assert plan.migrations == (lines.Migration(3, "r000", num_tokens=3, source_id=1, destination_id=2),)
    assert of_kind(lines.MigrationEndedLine, log) == [lines.MigrationEndedLine(2.5, 3, is_committed=False)]


def test_a_preemption_reports_what_is_dropped(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.plan(2.0, IterationPlan(preemptions=(Preemption("r000"),)))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert of_kind(lines.PlannedLine, log)[-1].preempted == (lines.Preempted("r000", {0: 3, 1: 3}),)


def test_an_eviction_reports_what_is_dropped_and_kept(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        parts = KVSegment("r000", range(0, 3, 2), 0), KVSegment("r000", range(1, 2), 1)
        reporter.plan(2.0, IterationPlan(evictions=tuple(map(Eviction, parts))))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert of_kind(lines.PlannedLine, log)[-1].evicted == (lines.Evicted("r000", {0: 2, 1: 1}, num_kept=3),)


def test_a_lease_that_is_to_end_early_is_named_with_the_step(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        lease = decode([first], (0, 1), {"r000": 1}, num_steps=5)
        reporter.plan(2.0, IterationPlan((replace(lease, predicted_time=0.25),)))
        reporter.plan(2.5, IterationPlan(lease_ends=(LeaseEnd(3, 2),)))
        for step in range(2):
            reporter.report(TokensProduced(3.0 + step, 3, step, (ProducedToken("r000", 5),)))
        reporter.report(BatchFinished(4.0, 3, 2))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert of_kind(lines.PlannedLine, log)[-1].ended_leases == (lines.EndedLease(3, 2),)
    assert log[-1] == lines.BatchEndedLine(4.0, 3, num_steps=2, seconds=1.0, predicted_seconds=0.25)


def test_a_batch_reports_chunks_from_single_tokens(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        _, second = prefill_two(reporter)
        reporter.report(RequestArrived(1.5, timed_request(2, 6, 9)))
        (third,) = reporter.state.snapshot(1.5).waiting
        mixed = both(decode([second], (2,), {"r001": 2}), prefill([third], (2,), num_tokens=4))
        reporter.plan(2.0, IterationPlan((mixed,)))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    (batch,) = of_kind(lines.PlannedLine, log)[-1].batches
    assert batch.decodes == (Decode("r001", first_position=6, master_id=2),)
    assert batch.chunks == (Chunk("r002", 0, 4, {2: 4}, {2: 4}),)


def test_the_policys_reasons_are_kept_and_infinite_costs_are_impossible(tmp_path: Path) -> None:
    weighed = (Alternative("1", 0.5), Alternative("2", float("inf")))
    why = Decision(DecisionKind.DOP, ("r000",), "1", weighed)

    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)), IterationPlan(decisions=(why,)))

    log = reported(tmp_path / "log", instances_with([20]), script)
    expected = (lines.ConsideredAlternative("1", 0.5), lines.ConsideredAlternative("2", None))
    assert of_kind(lines.PlannedLine, log)[0].reasons == (
        lines.Reason(DecisionKind.DOP, ("r000",), "1", expected),
    )


def test_what_a_request_waits_for_is_written_when_it_is_new_and_again_once_it_has_run(tmp_path: Path) -> None:
    def wait(reason: str, *request_ids: str) -> IterationPlan:
        return IterationPlan(decisions=(Decision(DecisionKind.WAIT, request_ids, reason),))

    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)), wait("room", "r000"))
        reporter.report(RequestArrived(0.5, timed_request(1, 6, 9)), wait("room", "r000", "r001"))
        reporter.plan(1.0, wait("room", "r000", "r001"))
        reporter.plan(1.5, wait("a step", "r001"))
        reporter.plan(2.0, wait("room", "r001"))
        (first, _) = reporter.state.snapshot(2.0).waiting
        reporter.plan(2.5, IterationPlan((prefill([first], (0,), num_tokens=2),)))
        reporter.plan(3.0, wait("room", "r000", "r001"))

    plans = of_kind(lines.PlannedLine, reported(tmp_path / "log", instances_with([20]), script))
    said = [(plan.time, reason.chosen, reason.request_ids) for plan in plans for reason in plan.reasons]
    assert said == [
        (0.0, "room", ("r000",)),
        (0.5, "room", ("r001",)),
        (1.5, "a step", ("r001",)),
        (2.0, "room", ("r001",)),
        (3.0, "room", ("r000",)),
    ]


def test_what_a_request_waits_for_is_written_again_once_it_has_lost_its_kv(tmp_path: Path) -> None:
    wait = IterationPlan(decisions=(Decision(DecisionKind.WAIT, ("r000",), "room"),))

    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        for time in (2.0, 2.5, 3.0):
            reporter.plan(time, wait)
        reporter.plan(4.0, IterationPlan(preemptions=(Preemption("r000"),)))
        reporter.plan(5.0, wait)
        reporter.report(InstanceLost(6.0, 2))
        reporter.plan(7.0, wait)

    plans = of_kind(lines.PlannedLine, reported(tmp_path / "log", instances_with([20] * 3), script))
    assert [plan.time for plan in plans if plan.reasons] == [2.0, 5.0, 7.0]


def test_what_is_done_is_written_each_time(tmp_path: Path) -> None:
    why = Decision(DecisionKind.PREEMPT, ("r000",), "it came last")

    def script(reporter: EventReporter) -> None:
        reporter.report(RequestArrived(0.0, timed_request(0, 6, 9)), IterationPlan(decisions=(why,)))
        reporter.plan(1.0, IterationPlan(decisions=(why,)))

    plans = of_kind(lines.PlannedLine, reported(tmp_path / "log", instances_with([20]), script))
    assert [reason.chosen for plan in plans for reason in plan.reasons] == ["it came last"] * 2


def test_a_request_that_a_plan_fails_ends_with_an_error_and_the_reason(tmp_path: Path) -> None:
    why = Decision(DecisionKind.FAIL, ("r000",), "it is too large")
    plan = IterationPlan(failures=(Failure("r000", why.chosen),), decisions=(why,))

    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.plan(2.0, plan)

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert of_kind(lines.EndedLine, log) == [
        lines.EndedLine(2.0, "r000", FinishReason.ERROR, num_output_tokens=1)
    ]
    assert of_kind(lines.PlannedLine, log)[-1].reasons[0].chosen == "it is too large"


def test_a_plan_that_does_nothing_for_no_reason_has_no_line(tmp_path: Path) -> None:
    log = reported(
        tmp_path / "log", instances_with([20] * 3), lambda reporter: reporter.plan(1.0, IterationPlan())
    )
    assert log == (lines.StartedLine(lines.VERSION),)


def test_instances_that_come_and_go_are_reported(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        _, second = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan((decode([second], (2,), {"r001": 2}, num_steps=5),)))
        reporter.report(InstanceLost(3.0, 2, "it was silent"))
        reporter.report(InstanceJoined(4.0, host_tier(7, 50)))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert log[-2:] == (
        lines.InstanceLostLine(3.0, 2, "it was silent", void_batch_ids=(3,)),
        lines.InstanceJoinedLine(4.0, 7, kv_capacity=50),
    )


def test_what_an_aborted_request_is_still_given_does_not_count(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, _ = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan((decode([first], (0, 1), {"r000": 1}, num_steps=5),)))
        reporter.report(TokensProduced(3.0, 3, 0, (ProducedToken("r000", 5),)))
        reporter.report(RequestAborted(3.5, "r000"))
        reporter.report(TokensProduced(4.0, 3, 1, (ProducedToken("r000", 5),)))
        reporter.report(BatchFinished(4.0, 3, 2))

    log = reported(tmp_path / "log", instances_with([20] * 3), script)
    assert of_kind(lines.EndedLine, log) == [
        lines.EndedLine(3.5, "r000", FinishReason.ABORT, num_output_tokens=2)
    ]


def test_who_looks_at_an_idle_cluster_sees_all_that_happened(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with decision_log(path) as log:
        EventReporter(log, instances_with([20])).report(RequestArrived(0.0, timed_request(0, 6, 9)))
        assert isinstance(read_log(path)[-1], lines.ArrivedLine)


def test_the_log_of_a_real_clock_says_when_that_began(tmp_path: Path) -> None:
    with decision_log(tmp_path / "log", clock_start=1e9):
        pass
    assert read_log(tmp_path / "log") == (lines.StartedLine(lines.VERSION, 1e9),)


def test_a_run_goes_on_when_the_disk_is_full(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), decision_log(Path("/dev/full")) as log:
        for view in prefill_two(EventReporter(log, instances_with([20] * 3))):
            assert view.num_output_tokens == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
