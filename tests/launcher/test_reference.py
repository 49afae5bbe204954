"""The reference of the command line is what the commands say."""

from pathlib import Path

import pytest

from loong.launcher.cli import COMMANDS, build_parser, main

WRITTEN = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_the_written_reference_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    assert WRITTEN.read_text() == capsys.readouterr().out, "run `loong reference > docs/command-line.md`"


def test_every_flag_says_what_it_does() -> None:
    parsers = list(build_parser(COMMANDS)[1].values())
    while parsers:
        parser = parsers.pop()
        parsers += parser.commands
        silent = [a.dest for actions in parser.groups.values() for a in actions if not a.help]
        assert silent in ([], ["shell"]), parser.prog
