from pathlib import Path

from eventful_run import LONG, eventful_run

from loong.launcher.plot.logged_history import history_of_log


def test_a_log_tells_what_ran_when_on_which_group(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    history = history_of_log(log)
    assert min(batch.started_at for batch in history.batches) == 0.0
    assert {batch.phase for batch in history.batches} == {"prefill", "decode"}
    assert all(batch.started_at < batch.ended_at for batch in history.batches)
    assert {batch.longest_prompt for batch in history.batches if LONG in batch.request_ids} >= {0, 600}
    assert history.kv_capacity == {0: 700, 1: 700, 2: 700}


def test_a_log_tells_which_kv_moved(tmp_path: Path) -> None:
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
