"""The start of the `loong` command. It imports little, so that any interrupt is one line."""

import os
import signal
import sys
from types import FrameType

from loong.launcher.exit_codes import INTERRUPTED, INTERRUPTED_CODE


def main() -> int:
    """Import and run the command line; return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, _end_at_once)  # importers may take an exception for their own failure
        from loong.launcher.cli import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from loong.launcher.cli import main as run
    return run()


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{INTERRUPTED}\n".encode())
    os._exit(INTERRUPTED_CODE)
