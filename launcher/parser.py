"""The command line's parser: an error is one line, with the likely correction."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from loong.core.similar_words import meant

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

USAGE_ERROR = 2


class CommandParser(argparse.ArgumentParser):
    """A parser that takes `_` for `-` in flags and no abbreviations, and suggests corrections.

    `elsewhere` returns where a flag that this parser lacks belongs, or None. Flags `taken_silently` have no
    effect.
    """

    elsewhere: Callable[[str], str | None] | None = None
    taken_silently: Collection[str] = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # whatever argparse is given

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """Return all flags and positional arguments, in the order of the help."""
        return self._actions

    @property
    def flags(self) -> Sequence[str]:
        """Return all flags as they are written."""
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def groups(self) -> dict[str, list[argparse.Action]]:
        """Return the actions that do something, by the headings of the help."""
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
        """Return the parsers of its own commands, if it has any."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [parser for action in nested for parser in action.choices.values()]

    def value_of(self, action: argparse.Action, words: Sequence[str]) -> object:
        """Return the value that these words give an action.

        Raises `argparse.ArgumentError` if they are invalid.
        """
        alone = CommandParser(prog=self.prog, add_help=False, exit_on_error=False)
        alone._add_action(action)
        return getattr(alone.parse_args(words), action.dest)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Print, and raise the write errors that argparse ignores."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit."""
        print(f"{self.prog}: error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the namespace's type alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse unknown arguments: a parser of one command refuses each by name."""
        found, rest = super().parse_known_args(args, namespace)
        if unknown := [word for word in rest if word.replace("_", "-") not in self.taken_silently]:
            self.error(self._unknown(unknown))
        return found, []

    def _unknown(self, words: Sequence[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0])
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        flag = word.partition("=")[0]
        place = None if self.elsewhere is None else self.elsewhere(flag.replace("_", "-"))
        return f"there is no flag {flag}{place or meant(flag, self.flags)}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            listed = f"{value!r} is none of {', '.join(choices)}"
            raise argparse.ArgumentError(action, listed + meant(str(value), choices))
