"""The start of the `loong` command. It imports little, so that any interrupt is one line."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "loong: interrupted"


def main() -> int:
    """Import and run the command line; return its exit code."""
    with importing():
        from loong.launcher.cli import main as run
    return run()


@contextmanager
def importing() -> Iterator[None]:
    """Return a context in which an interrupt ends this process at once.

    Modules that are imported may take an exception for their own failure.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell has it ignored
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + signal.SIGINT)
