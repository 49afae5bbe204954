"""`loong chaos`: flags and output."""

import argparse
import asyncio
import re
import signal
import sys
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.chaos.config import ChaosConfig, duration, interval
from loong.launcher.config_flags import FieldFlag, add_field_flags, field_values
from loong.launcher.flags import positive, ratio, token_count
from loong.launcher.keys import add_admin_key_flags, add_api_key_flags, admin_key, key_of_client

if TYPE_CHECKING:
    from loong.launcher.parser import CommandParser

_DEFAULT_URL = "http://localhost:8000"
_EXAMPLES = """\
examples:
  loong serve --allow-fault-injection           # in another terminal
  loong chaos --kill 1/30s --duration 5m        # kill a worker every half a minute
  loong chaos --kill-engine 1/30s --kill 1/20s  # also engines, of a server with --num-engines 2
  loong chaos --pause 1/60s --duration 5m       # stop one for 25 s, which is longer than it may be silent
  loong chaos --kill 1/10s --pause 1/60s --pause-time 5s --request-rate 8 --json
"""
_PAUSES = "time from SIGSTOP to SIGCONT; a worker that is silent for 20 s is lost"
_FAULT_FLAGS = (
    FieldFlag("pause_time", duration, "TIME", _PAUSES, "25s"),
    FieldFlag("duration", duration, "TIME", "time in which requests are sent and faults injected", "1m"),
)
_LOAD_FLAGS = (
    FieldFlag("request_rate", ratio, "R", "requests per second", "%(default)g"),
    FieldFlag("num_prompts", positive, "N", "number of prompts"),
    FieldFlag("longest_prompt", token_count, "N", "length of the longest prompt, in tokens"),
    FieldFlag("longest_output", token_count, "N", "length of the longest output, in tokens"),
    FieldFlag(
        "request_timeout", duration, "TIME", "time after which a request without an end counts as lost", "2m"
    ),
    FieldFlag("seed", int, None, "seed of prompts, arrivals and faults"),
)


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `chaos` and its flags."""
    parser = subparsers.add_parser(
        "chaos",
        help="kill and stop workers of a server under load, and compare its outputs",
        description="Record greedy outputs of a server with --allow-fault-injection. Then send the same "
        "prompts while workers are killed or stopped, and report lost, repeated and changed tokens. The "
        "exit code is 1 if there is any, or if a request was lost.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--base-url", default=_DEFAULT_URL, metavar="URL", help="address of the server (%(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="one of the server's models (the first)")
    add_api_key_flags(parser)
    add_admin_key_flags(parser)
    _add_fault_flags(parser.add_argument_group("faults"))
    add_field_flags(parser.add_argument_group("load"), ChaosConfig, _LOAD_FLAGS)
    parser.add_argument(
        "--json",
        action="store_true",
        help="end the output with one JSON object (on where the output is no terminal)",
    )


def _add_fault_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kill", type=interval, metavar="N/TIME", help="rate of SIGKILLs, such as 1/30s (none)"
    )
    group.add_argument(
        "--kill-engine",
        type=interval,
        metavar="N/TIME",
        help="rate of SIGKILLs of an engine's process, on a server with --num-engines, such as 1/30s (none)",
    )
    group.add_argument(
        "--kill-manager",
        type=interval,
        metavar="N/TIME",
        help="rate of SIGKILLs of the process that knows who lends, on a server with --lend (none)",
    )
    group.add_argument(
        "--pause", type=interval, metavar="N/TIME", help="rate of SIGSTOPs, such as 1/60s (none)"
    )
    add_field_flags(group, ChaosConfig, _FAULT_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Run and report. Return 1 if a token or a request was lost or a token is wrong.

    Otherwise return 0, or 130 if the run was interrupted.
    """
    import msgspec

    from loong.launcher.chaos.run import run_chaos  # these import what `--help` can do without

    report = asyncio.run(run_chaos(_config(args)))
    print("\n".join(report.lines()))
    if args.json or not sys.stdout.isatty():
        print(msgspec.json.encode(report.as_json()).decode())
    if not report.is_whole:
        return 1
    return 128 + signal.SIGINT if report.is_interrupted else 0


def _config(args: argparse.Namespace) -> ChaosConfig:
    from loong.engine.faults import FaultKind

    if re.fullmatch(r"https?://.+", args.base_url) is None:
        raise ConfigError(f"--base-url {args.base_url!r} is not a URL such as {_DEFAULT_URL}")
    given = {
        FaultKind.KILL: args.kill,
        FaultKind.KILL_ENGINE: args.kill_engine,
        FaultKind.KILL_MANAGER: args.kill_manager,
        FaultKind.PAUSE: args.pause,
    }
    intervals = {kind: seconds for kind, seconds in given.items() if seconds is not None}
    if not intervals:
        raise ConfigError(
            "nothing is to be injected; give --kill 1/30s, --kill-engine 1/30s or --pause 1/60s"
        )
    return ChaosConfig(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        model=args.model,
        api_key=key_of_client(args),
        admin_key=admin_key(args),
        intervals=intervals,
        **field_values(args, (*_FAULT_FLAGS, *_LOAD_FLAGS)),
    )
