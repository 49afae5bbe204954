"""`loong completion`: what lets a shell complete commands, flags and their values."""

import argparse
import shlex
from collections.abc import Iterator

from loong.launcher.parser import CommandParser

_EXAMPLES = """\
examples:
  source <(loong completion bash)   # in this shell; in ~/.bashrc for all
  source <(loong completion zsh)    # in ~/.zshrc, after compinit
"""
_FILES = ("FILE", "DIR", "MODEL", "LOG")  # metavars of files and folders
_BASH = """\
_loong() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "${{COMP_WORDS[1]}} $before" in
{values}
    *)
        if [[ $COMP_CWORD -eq 1 ]]; then
            words={commands}
        elif [[ $word == -* ]]; then
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac
        else
            COMPREPLY=($(compgen -f -- "$word"))
            return
        fi ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _loong loong
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `completion`."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that lets bash or zsh complete loong's commands and flags",
        description="Print a script that lets a shell complete commands, flags and their values.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="bash|zsh")


def run(args: argparse.Namespace) -> int:
    """Print the script and return 0."""
    from loong.launcher.cli import COMMANDS, build_parser  # which imports this

    print((_ZSH if args.shell == "zsh" else "") + script(build_parser(COMMANDS)[1]), end="")
    return 0


def script(commands: dict[str, CommandParser]) -> str:
    """Return a bash function that completes these commands."""
    flags = (
        f"            {name}) words={shlex.quote(' '.join(parser.flags))} ;;"
        for name, parser in commands.items()
    )
    values = (line for name, parser in commands.items() for line in _values(name, parser))
    return _BASH.format(
        commands=shlex.quote(" ".join(commands)), flags="\n".join(flags), values="\n".join(values)
    )


def _values(name: str, parser: CommandParser) -> Iterator[str]:
    """Yield the completion of the value of each flag that takes one."""
    for action in parser.actions:
        if action.nargs == 0 or not action.option_strings:
            continue
        pattern = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
        if action.choices is not None:
            yield f"    {pattern}) words={shlex.quote(' '.join(map(str, action.choices)))} ;;"
        elif action.metavar in _FILES:
            yield f'    {pattern}) COMPREPLY=($(compgen -f -- "$word")); return ;;'
        else:
            yield f"    {pattern}) return ;;"
