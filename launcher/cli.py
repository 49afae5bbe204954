"""The `loong` command."""

import errno
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

import loong
from loong.core.errors import LoongError
from loong.launcher.config_file import add_config_flag, apply_config_file
from loong.launcher.exit_codes import INTERRUPTED, INTERRUPTED_CODE
from loong.launcher.parser import CommandParser
from loong.processes.standard_streams import give_up_lost_streams, open_missing_streams, printable_streams

COMMANDS = {  # each a module with `add_parser`
    "serve": "loong.launcher.serve.command",
    "chat": "loong.launcher.chat",
    "models": "loong.launcher.models",
    "bench": "loong.launcher.bench.command",
    "simulate": "loong.launcher.simulate",
    "plot": "loong.launcher.plot",
    "profile": "loong.launcher.profile",
    "explain": "loong.launcher.explain",
    "scale": "loong.launcher.scale",
    "chaos": "loong.launcher.chaos",
    "workload": "loong.launcher.workload",
    "split": "loong.launcher.split",
    "plan": "loong.launcher.plan",
    "collect-env": "loong.launcher.collect_env",
    "completion": "loong.launcher.completion",
    "reference": "loong.launcher.reference",
}
CONFIGURABLE = ("serve", "bench", "simulate", "profile")  # by a file

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_EXAMPLES = """\
examples:
  loong chat --serve smollm2-135m               # fetch and serve a small real model, and talk to it
  loong serve                                   # a tiny random model on four CPU instances, no download
  loong serve ./Llama-3.1-8B --num-instances 2  # a folder, a GGUF file, or ORG/NAME of the hub
  loong chat                                    # talk to it, or to any OpenAI-compatible server
  loong bench --policy esp,static-sp --length-scale 1/64 --request-rate 10
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    open_missing_streams()
    with printable_streams():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: Sequence[str]) -> int:
    try:
        try:
            return _run(_with_help(_with_dashes(arguments)))
        finally:
            sys.stdout.flush()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 raises the second in place of what is raised while a class is made, as imports do.
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_CODE
    except LoongError as error:
        print(f"loong: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        give_up_lost_streams()
        return 128 + signal.SIGPIPE
    except OSError as error:
        give_up_lost_streams()
        if error.errno not in _NOT_WRITTEN:
            raise
        print(f"loong: error: output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _run(words: Sequence[str]) -> int:
    chosen = words[0] if words and words[0] in COMMANDS else None
    if chosen == "serve":  # before its modules start threads, which inherit what is blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    parser, commands = build_parser(COMMANDS if chosen is None else [chosen])
    defaults = {action.dest: action.default for action in commands[chosen].actions} if chosen else {}
    if chosen in CONFIGURABLE:
        apply_config_file(commands[chosen], words)
    args = parser.parse_args(words)
    args.chosen = {dest: value for dest, value in vars(args).items() if value != defaults.get(dest, value)}
    code: int = args.run(args)
    return code


def build_parser(names: Iterable[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of these commands, and each one's own; importing all of them takes a while."""
    parser = CommandParser(prog="loong", description=loong.__doc__, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"loong {loong.__version__}")
    subparsers = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command", parser_class=CommandParser
    )
    for name in names:
        import_module(COMMANDS[name]).add_parser(subparsers)
    commands: dict[str, CommandParser] = dict(subparsers.choices)
    for name in commands.keys() & CONFIGURABLE:
        add_config_flag(commands[name])
    return parser, commands


def _with_help(words: list[str]) -> list[str]:
    """Return the words that show help if `words` are empty or `help`, perhaps with a command.

    Else `words`.
    """
    if not words:
        return ["--help"]
    return [*words[1:2], "--help"] if words[0] == "help" else words


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `-` for `_` in the names of flags."""
    return [_with_dashes_in_name(a) if a.startswith("--") else a for a in arguments]


def _with_dashes_in_name(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value
