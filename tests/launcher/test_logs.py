"""How the server's log looks."""

import json
import logging
import sys

from loong.launcher.logs import JsonLines
from loong.launcher.serve import told_choices


def test_a_json_line_says_when_what_and_by_whom() -> None:
    record = logging.LogRecord("loong.engine", logging.WARNING, "", 0, "%d of\n%s", (3, "ü"), None)
    record.created = 86400.25
    (line,) = JsonLines().format(record).splitlines()
    assert json.loads(line) == {
        "time": "1970-01-02T00:00:00.250+00:00",
        "level": "WARNING",
        "logger": "loong.engine",
        "message": "3 of\nü",
    }


def test_a_json_line_holds_the_exception() -> None:
    try:
        int("no")
    except ValueError:
        record = logging.LogRecord("loong", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    (line,) = JsonLines().format(record).splitlines()
    assert json.loads(line)["exception"].endswith("'no'")


def test_choices_are_told_without_secrets() -> None:
    told = told_choices({"port": 8001, "api_key": ["hunter2"]})
    assert "port 8001" in told
    assert "api-key ***" in told
    assert "hunter2" not in told
