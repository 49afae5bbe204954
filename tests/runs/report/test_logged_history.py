from pathlib import Path

from decision_logs import EventReporter, prefill_two, reported
from eventful_run import LONG, eventful_run
from plans import decode, move
from simulation import instances_with

from loong.core.cluster_history import ChangeKind, InstanceChange
from loong.core.events import InstanceLost
from loong.core.plan import IterationPlan
from loong.runs.report.logged_history import history_of_log


def test_a_log_reports_what_ran_when_on_which_group(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    history = history_of_log(log)
    assert min(batch.started_at for batch in history.batches) == 0.0
    assert {batch.phase for batch in history.batches} == {"prefill", "decode"}
    assert all(batch.started_at < batch.ended_at for batch in history.batches)
    assert {batch.longest_prompt for batch in history.batches if LONG in batch.request_ids} >= {0, 600}
    assert history.kv_capacity == {0: 700, 1: 700, 2: 700}


def test_a_log_reports_which_kv_moved(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    moves = history_of_log(log).moves
    assert moves
    assert {(move.request_id, move.source_id, move.destination_id) for move in moves} == {(LONG, 1, 0)}
    assert all(move.is_committed and move.num_tokens for move in moves)


def test_no_pool_holds_more_than_it_can(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    history = history_of_log(log)
    for batch in history.batches:
        for instance_id, tokens in batch.kv_reserved:
            assert 0 <= tokens <= history.kv_capacity[instance_id]


def test_what_was_under_way_on_an_instance_that_was_lost_never_ends(tmp_path: Path) -> None:
    def script(reporter: EventReporter) -> None:
        first, second = prefill_two(reporter)
        reporter.plan(2.0, IterationPlan((decode([first], (0, 1), {"r000": 0}),), move(second, 2, 1)))
        reporter.report(InstanceLost(3.0, 1, "it was silent"))

    reported(tmp_path / "log", instances_with([20] * 3), script)
    history = history_of_log(tmp_path / "log")
    assert [(batch.batch_id, batch.ended_at) for batch in history.batches] == [(1, 1.0), (2, 1.0)]
    assert not history.moves
    assert history.changes == (InstanceChange(1, ChangeKind.LOST, 3.0, "it was silent"),)
