"""`loong scale`: flags, and progress in lines."""

import argparse
import sys
from collections.abc import Iterator
from time import monotonic, sleep
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.flags import count, positive
from loong.launcher.keys import ADMIN_KEY_VARIABLE, add_admin_key_flags, admin_key

if TYPE_CHECKING:
    from loong.launcher.parser import CommandParser
    from loong.launcher.scale.client import Size

_INTERRUPTED = 130
_POLL_SECONDS = 0.2
_EXAMPLES = """\
examples:
  export LOONG_ADMIN_API_KEY=...                # as for `loong serve --num-instances 2 --max-instances 4`
  loong scale --num-instances 4                 # two more; returns when all serve
  loong scale --num-instances 1 --no-wait       # the others leave once their requests have gone elsewhere
  loong scale --num-instances 4 --memory-instances 1  # of several, one memory instance stays
  loong scale                                   # shows the instances
"""


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `scale` and its flags."""
    parser = subparsers.add_parser(
        "scale",
        help="add or remove instances of a running server",
        description="Change the number of instances of a running CPU server. Requests go on: KV on instances "
        "that leave moves to others, or is computed again. Ctrl-C leaves the change going on.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--num-instances",
        type=positive,
        metavar="N",
        help="instances that are to serve; those of the highest ids leave (shows the present ones)",
    )
    parser.add_argument(
        "--memory-instances",
        type=count,
        metavar="N",
        help="memory instances that are to serve (as many as before)",
    )
    parser.add_argument(
        "--base-url",
        default="http://localhost:8000",
        metavar="URL",
        help="address of the server (%(default)s)",
    )
    parser.add_argument(
        "--engine",
        type=int,
        metavar="I",
        help="engine whose instances are meant, from 0, on a server with --num-engines",
    )
    add_admin_key_flags(parser)
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until the change is done, and print its progress (on)",
    )


def run(args: argparse.Namespace) -> int:
    """Change the number of instances and return 0, or 130 after an interrupt.

    Raises `ScaleError` if the server refuses or cannot be reached.
    """
    from loong.launcher.scale.client import OperatedServer  # imports what `--help` can do without

    if (key := admin_key(args)) is None:
        raise ConfigError(f"set ${ADMIN_KEY_VARIABLE} or --admin-key-file, as for `loong serve`")
    server = OperatedServer(args.base_url.rstrip("/"), key, args.engine)
    if args.num_instances is None and args.memory_instances is not None:
        raise ConfigError("--memory-instances needs --num-instances, which it does not change alone")
    if args.num_instances is None:
        print("\n".join(_lines(server.size())))
        return 0
    start, size = monotonic(), server.scale(args.num_instances, args.memory_instances)
    seen: list[str] = []
    try:
        while True:
            new = [line for line in _lines(size) if line not in seen]
            seen = list(_lines(size))
            if new:
                print("\n".join(new), flush=True)
            if size.num_instances != args.num_instances:
                raise ConfigError(f"meanwhile, {size.num_instances} instances were asked for")
            if size.is_done:
                print(f"done after {monotonic() - start:.1f} s")
                return 0
            if not args.wait:
                return 0
            sleep(_POLL_SECONDS)
            size = server.size()
    except KeyboardInterrupt:
        print("the change goes on; `loong scale` shows the instances", file=sys.stderr)
        return _INTERRUPTED


def _lines(size: "Size") -> Iterator[str]:
    """Yield a line for each instance, and one for all."""
    for instance in size.instances:
        held = f", {instance.kv_used:,} tokens of KV left" if instance.state == "draining" else ""
        name = "memory instance" if instance.kind == "attention" else "instance"
        yield f"{name} {instance.id}: {instance.state}{held}"
    num_serving = sum(i.state == "serving" and i.kind == "full" for i in size.instances)
    yield f"instances: {num_serving} serving, {size.num_instances} wanted, {size.max_instances} at most"
