"""The log of a server: records of all its processes, which one thread writes to standard error.

A write to a pipe that nobody reads waits as soon as the pipe is full. In the engine's process only that
thread may wait: it takes lines from a bounded queue. Records that find it full are dropped and counted.
Other processes of the server write to a pipe that the engine's process always reads.
"""

import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime
from threading import Condition, Thread
from time import monotonic

FORMATS = ("text", "json")
MAX_QUEUED_BYTES = 2**18  # as much again may be in the write that waits
_FLUSH_SECONDS = 1.0  # at the end, for all
_MAX_LINE_BYTES = 2**16  # of another process; a longer line is passed on in parts
_STDERR = 2
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger and message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(kind: str) -> None:
    """Log to standard error from now on, in one of `FORMATS`, and wait for its reader."""
    handler = LineHandler(lambda line: write_all(_STDERR, line), _formatter(kind))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)


@contextmanager
def queued_log(kind: str) -> Iterator[None]:
    """Log to standard error in one of `FORMATS` while the context lasts, and never wait for its reader.

    `sys.stderr` is part of the log meanwhile. At the end, what is queued has a second to be written. If that
    is too short, standard error becomes the null device, so that nothing that follows waits.
    """
    handler = QueuedHandler(_formatter(kind))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    try:
        with (
            open(handler.descriptor, "w", buffering=1, errors="backslashreplace", closefd=False) as stray,
            redirect_stderr(stray),
        ):
            yield
    finally:
        logging.captureWarnings(capture=False)
        logging.root.removeHandler(handler)
        handler.finish()


def child_stderr() -> int | None:
    """Return the descriptor that is to be the standard error of a child process; None: that of this one."""
    return next((handler.descriptor for handler in _queued_handlers()), None)


def num_dropped_records() -> int:
    """Return how many records were dropped so far because nobody read the log."""
    return sum(handler.queue.num_dropped for handler in _queued_handlers())


class LineQueue:
    """Lines on their way to a descriptor, which a thread writes in order.

    `put` never waits: beyond `max_bytes` in the queue lines are dropped, as are those that cannot be written.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], bytes], max_bytes: int) -> None:
        """Take what to write when there is room again, as a function of the number of lines dropped."""
        self.num_dropped = 0
        self._descriptor, self._notice, self._max_bytes = descriptor, notice, max_bytes
        self._changed = Condition()  # its lock can be taken again: a collection of garbage may log anywhere
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_unreported = 0
        self._is_closing = False
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, or drop it if there is no room."""
        with self._changed:
            if self._lines and self._num_bytes + len(line) > self._max_bytes:
                self._drop(1)
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._changed.notify()

    def close(self, seconds: float) -> bool:
        """Take no more; return whether all that was queued is written within this time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _drop(self, num_lines: int) -> None:
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _run(self) -> None:
        while taken := self._take():
            lines, num_unreported = taken
            notices = [self._notice(num_unreported)] if num_unreported else []
            try:
                write_all(self._descriptor, b"".join(lines + notices))
            except OSError:  # nobody can read any more, or the disk is full: this may pass
                with self._changed:
                    self._num_unreported += num_unreported
                    self._drop(len(lines))

    def _take(self) -> tuple[list[bytes], int] | None:
        """Wait for lines; return those there are, and the number dropped since. None: the queue is closed."""
        with self._changed:
            while not self._lines:
                if self._is_closing:
                    return None
                self._changed.wait()
            taken = self._lines, self._num_unreported
            self._lines, self._num_bytes, self._num_unreported = [], 0, 0
            return taken


class LineHandler(logging.Handler):
    """Hands each record on as bytes in one piece, between which other processes may write theirs."""

    def __init__(self, put: Callable[[bytes], None], formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._put, self._encoding = put, sys.stderr.encoding

    def line(self, record: logging.LogRecord) -> bytes:
        """Return what is written for a record."""
        return self.format(record).encode(self._encoding, "backslashreplace") + b"\n"

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            self._put(self.line(record))
        except Exception:  # noqa: BLE001  as the library's handlers: logging never fails
            self.handleError(record)


class QueuedHandler(LineHandler):
    """Puts records into a queue, and with them what other processes write to `descriptor`, a pipe."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.queue = LineQueue(_STDERR, self._notice, MAX_QUEUED_BYTES)
        super().__init__(self.queue.put, formatter)
        receiving, self.descriptor = os.pipe()
        self._reader = Thread(target=self._pass_on, args=(receiving,), name="log of others", daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Write what is there. If that takes too long, standard error becomes the null device."""
        deadline = monotonic() + _FLUSH_SECONDS
        os.close(self.descriptor)
        self._reader.join(_FLUSH_SECONDS / 2)  # the end of the pipe comes with that of the other processes
        if not self.queue.close(deadline - monotonic()):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _STDERR)
            os.close(nowhere)

    def _notice(self, num_dropped: int) -> bytes:
        message = "%d records of the log were dropped: its reader is too slow"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (num_dropped,), None)
        return self.line(record)

    def _pass_on(self, descriptor: int) -> None:
        with open(descriptor, "rb") as pipe:
            while line := pipe.readline(_MAX_LINE_BYTES):
                self.queue.put(line)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all, even to a descriptor that does not block. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program may have made the terminal so
            select.select((), (descriptor,), ())


def _formatter(kind: str) -> logging.Formatter:
    return JsonLines() if kind == "json" else logging.Formatter(_TEXT)


def _queued_handlers() -> list[QueuedHandler]:
    return [handler for handler in logging.root.handlers if isinstance(handler, QueuedHandler)]
