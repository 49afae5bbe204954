"""What others send reaches no terminal as a command to it."""

import sys
from pathlib import Path

import msgspec
import pytest
from eventful_run import LONG, eventful_run
from tqdm import tqdm

from loong.launcher.cli import main
from loong.processes.standard_streams import printable_streams

BAD = "\x1b]0;owned\x07\x1b[31m\r\x9b31m"
SHOWN = "\\u001b]0;owned\\u0007\\u001b[31m\\u000d\\u009b31m"


def test_output_and_errors_are_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_streams():
        sys.stdout.write(f"an answer{BAD}\tof {BAD}\n")
        sys.stderr.write(f"an error{BAD}\n")
        sys.stdout.flush()
    printed = capsys.readouterr()
    assert printed.out == f"an answer{SHOWN}\tof {SHOWN}\n"
    assert printed.err == f"an error{SHOWN}\n"


def test_progress_bars_move_the_cursor_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_streams(), tqdm(total=2, desc=f"a{BAD}", leave=False) as bar, tqdm(total=2, position=1):
        bar.update()
    shown = capsys.readouterr().err
    assert f"\ra{SHOWN}: " in shown
    assert "\x1b[A" in shown
    assert not shown.replace("\x1b[A", "").replace("\r", "").count("\x1b")


@pytest.mark.parametrize("flags", [(), ("--json",), ("--request", "ev")])
def test_a_log_is_explained_without_the_control_characters_in_it(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    request_id = msgspec.json.encode(f"ev{BAD}")
    log.write_bytes(log.read_bytes().replace(msgspec.json.encode(LONG), request_id))
    assert main(["explain", str(log), *flags]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\r", "\x9b"} & set(printed)
    assert "ev\\u001b]0;owned" in printed


def test_an_error_names_a_file_without_its_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["explain", f"no{BAD}"], ["plot", f"no{BAD}"], ["serve", f"no{BAD}"]):
        assert main(words) == 1
        printed = capsys.readouterr()
        assert not {"\x1b", "\r", "\x9b"} & {*printed.out, *printed.err}, words
