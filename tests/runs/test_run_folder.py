import os
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.runs.run_folder import newest_decision_log, newest_run, run_folder


def made_at(second: int, path: str, text: str = "{}") -> Path:
    """Return a file as if written at that second."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (second, second))
    return file


def made(kind: str, asked: Path | None) -> Path:
    """Return the folder of a run that has ended."""
    with run_folder(kind, asked) as folder:
        return folder


def test_each_run_has_a_folder_of_its_own() -> None:
    assert [made("bench", None) for _ in range(2)] == [
        Path("loong-runs/bench-1"),
        Path("loong-runs/bench-2"),
    ]
    assert made("simulate", None) == Path("loong-runs/simulate-1")


def test_a_folder_with_results_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Path("deep/run")
    assert made("bench", asked) == asked
    assert made("bench", asked) == asked  # nothing is there that could be lost
    assert capsys.readouterr().err == ""
    made_at(1, "deep/run/results.json")
    assert made("bench", asked) == Path("deep/run-2")
    assert "deep/run has the results of another run; this run goes into deep/run-2" in capsys.readouterr().err
    assert made("bench", asked) == Path("deep/run-3")


def test_runs_at_one_time_do_not_share_a_folder() -> None:
    with run_folder("bench", None) as one, run_folder("bench", None) as other:
        assert (one, other) == (Path("loong-runs/bench-1"), Path("loong-runs/bench-2"))
    asked = Path("run")
    said = "--output-dir run is being written by another process"
    with run_folder("bench", asked), pytest.raises(ConfigError, match=said):
        made("simulate", asked)
    assert made("simulate", asked) == asked


def test_the_newest_run_is_found_wherever_it_is() -> None:
    with pytest.raises(ConfigError, match="`loong bench` or `loong simulate` makes one"):
        newest_run()
    made_at(1, "loong-runs/bench-1/results.json")
    assert newest_run() == Path("loong-runs/bench-1")
    made_at(2, "mine/results.json")
    assert newest_run() == Path("mine")
    made_at(3, "results.json")
    assert newest_run() == Path()


def test_the_newest_decision_log_is_found_among_other_files() -> None:
    with pytest.raises(ConfigError, match="`loong serve --decision-log decisions"):
        newest_decision_log()
    log = '{"line":"started", ...'
    made_at(1, "loong-runs/bench-1/decisions-esp.jsonl", log)
    made_at(3, "events.jsonl")
    Path("folder.jsonl").mkdir()
    assert newest_decision_log() == Path("loong-runs/bench-1/decisions-esp.jsonl")
    made_at(2, "why.jsonl", log)
    assert newest_decision_log() == Path("why.jsonl")
