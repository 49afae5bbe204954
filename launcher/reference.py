"""`loong reference`: commands and flags, or the API, as Markdown: docs/command-line.md and docs/api.md."""

import argparse
from collections.abc import Iterator

from loong.launcher.parser import CommandParser

NUM_EXAMPLES = 2  # of each command; its --help has all

_INTRODUCTION = """\
# The command line

Written by `loong reference > docs/command-line.md`; `loong COMMAND --help` has more examples.
In flags, `_` may replace `-`. A `--config FILE` is YAML with the names of flags as keys
(`num-instances: 2`; `model` for MODEL; lists where a flag may be repeated; quotes around values with colons).
The command line takes precedence over the file, and the file over defaults. An unknown key is an error.
"""


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `reference`."""
    parser = subparsers.add_parser(
        "reference",
        help="print every command and flag, or the API, as Markdown",
        description="Print every command and flag, or the HTTP API, as Markdown.",
        epilog="examples:\n  loong reference > docs/command-line.md\n  loong reference --api > docs/api.md\n",
    )
    parser.add_argument(
        "--api", action="store_true", help="print the endpoints and fields of the HTTP API instead"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the reference and return 0."""
    if args.api:
        from loong.server.reference.api_reference import api_reference  # slow to import

        print(api_reference(), end="")
        return 0
    from loong.launcher.cli import COMMANDS, build_parser  # which imports this

    print(reference(build_parser(COMMANDS)[1]), end="")
    return 0


def reference(commands: dict[str, CommandParser]) -> str:
    """Return a section for each command: a table for each group of flags, and examples."""
    first_in: dict[str, str] = {}
    return "\n".join(
        [_INTRODUCTION, *(line for parser in commands.values() for line in _section(parser, "##", first_in))]
    )


def _section(parser: CommandParser, heading: str, first_in: dict[str, str]) -> Iterator[str]:
    """Yield a command's lines. `first_in` maps each row already written to its command, and grows."""
    yield f"{heading} {parser.prog}\n"
    if parser.description:
        yield f"{parser.description}\n"
    for title, actions in parser.groups.items():
        yield from _table(title, actions, parser.prog, first_in)
    for nested in parser.commands:
        yield from _section(nested, f"{heading}#", first_in)
    if parser.epilog:
        examples = "\n".join(_examples(parser.epilog)[:NUM_EXAMPLES])
        yield f"```bash\n{examples}\n```\n"


def _examples(epilog: str) -> list[str]:
    """Return the commands of an epilog, each with the lines that continue it."""
    commands: list[str] = []
    for line in epilog.splitlines()[1:]:
        if commands and commands[-1].endswith("\\"):
            commands[-1] += f"\n    {line.strip()}"
        elif line.strip():
            commands.append(line.strip())
    return commands


def _table(title: str, actions: list[argparse.Action], prog: str, first_in: dict[str, str]) -> Iterator[str]:
    """Yield a table of the flags that no earlier command has, then the names of the others."""
    rows = {f"|{_written(action)}|{_meaning(action)}|": action for action in actions}
    new = [row for row in rows if row not in first_in]
    if new:
        yield f"|{title}|meaning|\n|---|---|"
        yield from new
        yield ""
    known: dict[str, list[str]] = {}
    for row, action in rows.items():
        if row in first_in:
            known.setdefault(first_in[row], []).append(f"`{(action.option_strings or [_value(action)])[0]}`")
    for command, names in known.items():
        yield f"{title.capitalize()}, as in `{command}`: {', '.join(names)}.\n"
    first_in |= dict.fromkeys(new, prog)


def _written(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else " " + _value(action)
    if not action.option_strings:
        return f"`{value.strip()}`"
    return ", ".join(f"`{flag}{value if flag.startswith('--') else ''}`" for flag in action.option_strings)


def _value(action: argparse.Action) -> str:
    match action.metavar:
        case str():
            return action.metavar
        case (first, others):
            return f"{first} [{others}]"
    return action.dest.upper() if action.choices is None else "VALUE"


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": "loong"}
    if action.choices is not None and action.option_strings:
        text += f"; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
    return text.replace("|", "\\|")
