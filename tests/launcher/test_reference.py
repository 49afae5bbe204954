"""The reference of the command line is what the commands say."""

from pathlib import Path

from loong.launcher.cli import COMMANDS, build_parser
from loong.launcher.reference import reference

WRITTEN = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_the_written_reference_is_current() -> None:
    told = reference(build_parser(COMMANDS)[1])
    assert WRITTEN.read_text() == told, "run `loong reference > docs/command-line.md`"


def test_every_flag_says_what_it_does() -> None:
    parsers = list(build_parser(COMMANDS)[1].values())
    while parsers:
        parser = parsers.pop()
        parsers += parser.commands
        silent = [a.dest for actions in parser.groups.values() for a in actions if not a.help]
        assert silent in ([], ["shell"]), parser.prog
