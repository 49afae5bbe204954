"""Files that runs write: refused before anything is written."""

from pathlib import Path

import pytest
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.launcher.runs.run_logs import LogFiles, run_logs
from loong.observability.recording.lines import VERSION, Setting
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
