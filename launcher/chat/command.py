"""`loong chat`: flags, and lines from the terminal."""

import argparse
import sys

from loong.core.errors import ConfigError
from loong.launcher.chat.session import HELP, Session
from loong.launcher.flags import (
    add_host_tier_flag,
    add_prefix_caching_flag,
    host_tier_words,
    positive,
    prefix_caching_words,
)
from loong.launcher.keys import add_api_key_flags, key_of_client
from loong.launcher.parser import CommandParser

_DEFAULT_URL = "http://localhost:8000"
_EXAMPLES = """\
examples:
  loong chat                                              # with `loong serve` on this machine
  loong chat --base-url http://gpu-7:8000 --system 'Be brief.' --temperature 0.2
  echo 'What is a ring?' | loong chat --max-tokens 100    # one answer
  loong chat --serve smollm2-135m --temperature 0         # with a server of its own, which ends with the chat
"""


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `chat` and its flags."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a served model in the terminal",
        description=f"Talk to a served model.\n\n{HELP}",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help=f"address of an OpenAI-compatible server ({_DEFAULT_URL})",
    )
    parser.add_argument(
        "--serve",
        metavar="MODEL",
        help="start `loong serve MODEL` on a free port, on four CPU instances, and end it with the chat (no)",
    )
    add_prefix_caching_flag(parser, is_of_serve=True)
    add_host_tier_flag(parser)
    parser.add_argument("--model", metavar="NAME", help="one of the server's models (the first)")
    add_api_key_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the chat")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="longest answer, in tokens (%(default)s)",
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="sampling temperature (the server's)")
    parser.add_argument("--top-p", type=float, metavar="X", help="nucleus sampling threshold (the server's)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of sampling, to get the same answers again (random)"
    )


def _own_words(args: argparse.Namespace) -> tuple[str, ...]:
    return (*prefix_caching_words(args), *host_tier_words(args))


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, and return 0. Raises `ChatError` if the server cannot be reached.

    Raises `ConfigError` if there is no such model to serve, or `ServerUnusableError` if it does not start.
    """
    if args.serve is None:
        if words := _own_words(args):
            raise ConfigError(f"{words[0]} is of a server that --serve starts; give that too")
        return _talk(args, args.base_url or _DEFAULT_URL)
    if args.base_url is not None:
        raise ConfigError("--serve starts a server of its own, so --base-url cannot be given as well")
    from loong.launcher.chat.own_server import own_server  # these import what a chat alone does without

    with own_server(args.serve, _own_words(args)) as url:
        return _talk(args, url)


def _talk(args: argparse.Namespace, url: str) -> int:
    from loong.launcher.chat.client import ChatServer  # these import what `--help` can do without

    server = ChatServer(url.rstrip("/"), key_of_client(args))
    model = args.model or server.model()
    names = ("max_tokens", "temperature", "top_p", "seed")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    session = Session(server, {"model": model, **options}, args.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  gives lines a history, and keys to edit them

        print(f"{model} at {server.base_url}; /help lists commands")
    while (line := _line("> " if is_terminal else "")) is not None:
        if not session.take(line.strip()):
            break
    return 0


def _line(prompt: str) -> str | None:
    """Return the next typed line: empty if it is interrupted, None at the end of the input."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        if prompt:
            print()
        return None
