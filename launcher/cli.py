"""The `loong` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import loong
from loong.core.errors import LoongError
from loong.launcher import bench, explain, profile, serve, simulate, workload

_EXAMPLES = """\
examples:
  loong serve                                   a tiny built-in model on four CPU instances, no download
  loong serve ./Llama-3.1-8B --num-instances 2  a local Hugging Face folder
  loong bench --policy esp,static-sp --length-scale 1/64 --request-rate 10
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="loong",
        description=loong.__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"loong {loong.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (serve, bench, simulate, profile, explain, workload):
        command.add_parser(subparsers)
    args = parser.parse_args(_with_dashes(sys.argv[1:] if arguments is None else arguments))
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has seen enough, as `head` may have
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except LoongError as error:
        print(f"loong: error: {error}", file=sys.stderr)
        return 1
    return code


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """The same flags with `-` for `_` in their names."""
    return [_with_dashes_in_name(a) if a.startswith("--") else a for a in arguments]


def _with_dashes_in_name(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value
