"""The command line's parser: one line for what is wrong, with what would work."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

USAGE_ERROR = 2
LEAST_SIMILARITY = 0.65  # of words that are mistaken for each other


class CommandParser(argparse.ArgumentParser):
    """Takes `_` for `-` in flags, no abbreviations, and tells which flag or word was meant.

    `elsewhere` says of a flag that it does not have where that belongs; nothing where it does not know.
    """

    elsewhere: Callable[[str], str | None] | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # whatever argparse is given

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """All flags and positional arguments, in the order of the help."""
        return self._actions

    @property
    def flags(self) -> Sequence[str]:
        """All flags as they are written."""
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def groups(self) -> dict[str, list[argparse.Action]]:
        """The actions that do something, by the headings of the help."""
        shown = {
            str(group.title): [
                action
                for action in group._group_actions
                if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
            ]
            for group in self._action_groups
        }
        return {title: actions for title, actions in shown.items() if actions}

    @property
    def commands(self) -> "list[CommandParser]":
        """The parsers of its own commands, if it has any."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [parser for action in nested for parser in action.choices.values()]

    def value_of(self, action: argparse.Action, words: Sequence[str]) -> object:
        """What these words give one of the actions. Raises `argparse.ArgumentError` if they cannot."""
        alone = CommandParser(prog=self.prog, add_help=False, exit_on_error=False)
        alone._add_action(action)
        return getattr(alone.parse_args(words), action.dest)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Print, and raise what goes wrong, which argparse passes over."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong, and end."""
        print(f"{self.prog}: error: {message} (`{self.prog} --help` tells all)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the namespace's type alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Leave nothing unknown: a parser of one command refuses it by name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, []

    def _unknown(self, words: Sequence[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0])
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        flag = word.partition("=")[0]
        place = None if self.elsewhere is None else self.elsewhere(flag)
        return f"there is no flag {flag}{place or meant(flag, self.flags)}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            listed = f"{value!r} is none of {', '.join(choices)}"
            raise argparse.ArgumentError(action, listed + meant(str(value), choices))


def meant(word: str, known: Iterable[str]) -> str:
    """A question about the likeliest of the known words; nothing if none is like it."""
    likely = get_close_matches(word, known, n=1, cutoff=LEAST_SIMILARITY)
    return f"; did you mean {likely[0]}?" if likely else ""
