"""Files that runs write: refused before anything is written."""

from pathlib import Path

import pytest
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.observability.decision_log.line_file import LineFile
from loong.observability.recording.lines import VERSION, Setting
from loong.runs.run_logs import LogFiles, run_logs
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel

SETTING = Setting(VERSION, "", instances_with([9]), "esp", PolicyConfig(), WorkCostModel())


def test_an_event_log_that_is_refused_leaves_the_decision_log_as_it_was(tmp_path: Path) -> None:
    decisions, events = tmp_path / "decisions", tmp_path / "events"
    events.touch()
    with pytest.raises(ConfigError, match="exists"), run_logs(LogFiles(decisions, events), SETTING):
        pass
    assert not decisions.exists()


def test_two_logs_in_one_file_are_refused_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="--decision-log and --event-log are both"):
        LogFiles(tmp_path / "log", tmp_path / "folder" / ".." / "log")


def test_two_servers_do_not_write_one_log(tmp_path: Path) -> None:
    files = LogFiles(tmp_path / "decisions", tmp_path / "events")
    with run_logs(files, SETTING):
        again = LogFiles(files.decisions, tmp_path / "other events")
        with pytest.raises(ConfigError, match="decisions is being written by another process"):
            again.check()
        with pytest.raises(ConfigError, match="decisions is being written"), run_logs(again, SETTING):
            pass
    with run_logs(LogFiles(files.decisions, tmp_path / "third"), SETTING):  # after the first one's end
        pass


def test_two_servers_do_not_write_one_recording_even_if_both_found_it_free(tmp_path: Path) -> None:
    path = tmp_path / "events"
    files = LogFiles(events=path)
    files.check()
    with run_logs(files, SETTING):
        with pytest.raises(ConfigError, match="events exists"):
            LogFiles(events=path).check()
        with pytest.raises(ConfigError, match="events: File exists"):
            LineFile(path, is_new=True)


def test_a_log_may_be_a_device_that_others_have(tmp_path: Path) -> None:
    nowhere = LogFiles(Path("/dev/null"))
    nowhere.check()
    with run_logs(nowhere, SETTING), run_logs(nowhere, SETTING):
        pass
