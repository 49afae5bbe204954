"""Standard input, output and error, which may be closed or broken."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from loong.core.printable import printable

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors
_UP = "\x1b[A"


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, before a socket gets its descriptor."""
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def give_up_lost_streams() -> None:
    """Redirect output and error to the null device if they cannot be written.

    Otherwise the flush at exit would fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Write no control character to standard output and error while the context lasts.

    Their texts are of logs, models and servers, and a terminal would obey them.
    """
    with redirect_stdout(PrintableStream(sys.stdout)), redirect_stderr(_ErrorStream(sys.stderr)):
        yield


class PrintableStream:
    """A text stream without control characters, apart from tabs and line breaks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, with escapes for its control characters."""
        return self._stream.write(printable(text))

    def flush(self) -> None:
        """Pass on all that was written."""
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _ErrorStream(PrintableStream):
    """The stream of progress bars as well, which begin at the start of a line or move to another one."""

    def write(self, text: str) -> int:
        """Write a text, or a move of the cursor, which no text of others begins with."""
        is_move = not text.strip(f"\n{_UP}")
        start = "\r" if text.startswith("\r") else ""
        return self._stream.write(text if is_move else start + printable(text.removeprefix(start)))
