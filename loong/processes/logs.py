"""The log of a server: records of all its processes, which one thread writes to standard error.

What clients and models send is in it without control characters, which a terminal would obey.

A write to a pipe blocks when nobody reads the pipe and it is full. In the engine's process only the log's
thread may block. It takes lines from a bounded queue. Records are dropped and counted when the queue is full.
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

from loong.core.printable import printable

FORMATS = ("text", "json")
MAX_QUEUED_BYTES = 2**18  # the blocked write may hold as many again
_FLUSH_SECONDS = 1.0  # to write all queued lines at the end
_MAX_LINE_BYTES = 2**16  # of another process; longer lines are split
_STDERR = 2
_TEXT = "%(asctime)s %(levelname)s {}%(message)s"


class TextLines(logging.Formatter):
    """Formats a record as a line with time, level and `source`. Further lines of its message are indented."""

    def __init__(self, source: str = "") -> None:
        super().__init__(_TEXT.format(source and f"{source}: "))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its name in the base class
        """Return the line without the exception."""
        return super().formatMessage(record).replace("\n", "\n    ")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and the source and exception, if
    any.
    """

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._source = {"source": source} if source else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._source,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(kind: str, source: str = "") -> None:
    """Log to standard error from now on, in one of `FORMATS`. Writes may block.

    Lines name their `source`, if there are several processes of a kind.
    """
    handler = LineHandler(lambda line: write_all(_STDERR, line), _formatter(kind, source))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)


@contextmanager
def queued_log(kind: str) -> Iterator[None]:
    """Log to standard error in one of `FORMATS` while the context lasts. Writes never block.

    `sys.stderr` is part of the log meanwhile. At the end, queued lines have one second to be written. After
    that, standard error becomes the null device, so that later writes do not block.
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
    """Return the descriptor for the standard error of a child process. None means that of this process."""
    return next((handler.descriptor for handler in _queued_handlers()), None)


def num_dropped_records() -> int:
    """Return the number of records dropped so far because nobody read the log."""
    return sum(handler.queue.num_dropped for handler in _queued_handlers())


class LineQueue:
    """Lines on their way to a descriptor, which a thread writes in order.

    `put` never waits. Lines beyond `max_bytes` in the queue are dropped, and so are lines that cannot be
    written.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], bytes], max_bytes: int) -> None:
        """Start the thread. `notice` returns the line to write after a number of lines was dropped."""
        self.num_dropped = 0
        self._descriptor, self._notice, self._max_bytes = descriptor, notice, max_bytes
        self._changed = Condition()  # its lock is reentrant: garbage collection may log anywhere
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
        """Accept no more lines, and return whether all queued lines are written within `seconds`."""
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
            except OSError:  # the reader is gone, or the disk is full, perhaps not for ever
                with self._changed:
                    self._num_unreported += num_unreported
                    self._drop(len(lines))

    def _take(self) -> tuple[list[bytes], int] | None:
        """Wait for lines; return them and the number dropped since the last call.

        None: the queue is closed.
        """
        with self._changed:
            while not self._lines:
                if self._is_closing:
                    return None
                self._changed.wait()
            taken = self._lines, self._num_unreported
            self._lines, self._num_bytes, self._num_unreported = [], 0, 0
            return taken


class LineHandler(logging.Handler):
    """A handler that passes each record on as bytes in one piece, between lines of other processes."""

    def __init__(self, put: Callable[[bytes], None], formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._put, self._encoding = put, sys.stderr.encoding

    def line(self, record: logging.LogRecord) -> bytes:
        """Return the line of a record."""
        return printable(self.format(record)).encode(self._encoding, "backslashreplace") + b"\n"

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            self._put(self.line(record))
        except Exception:  # noqa: BLE001  as the library's handlers: logging never fails
            self.handleError(record)


class QueuedHandler(LineHandler):
    """A handler that queues records, and the lines that other processes write to `descriptor`, a pipe."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.queue = LineQueue(_STDERR, self._notice, MAX_QUEUED_BYTES)
        super().__init__(self.queue.put, formatter)
        receiving, self.descriptor = os.pipe()
        self._reader = Thread(target=self._pass_on, args=(receiving,), name="log of others", daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Write the queued lines. If that takes too long, standard error becomes the null device."""
        deadline = monotonic() + _FLUSH_SECONDS
        os.close(self.descriptor)
        self._reader.join(_FLUSH_SECONDS / 2)  # the pipe ends when the other processes end
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
                self.queue.put(printable(line.decode(errors="backslashreplace")).encode())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data, even to a non-blocking descriptor. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program may have set the terminal to non-blocking
            select.select((), (descriptor,), ())


def _formatter(kind: str, source: str = "") -> logging.Formatter:
    return JsonLines(source) if kind == "json" else TextLines(source)


def _queued_handlers() -> list[QueuedHandler]:
    return [handler for handler in logging.root.handlers if isinstance(handler, QueuedHandler)]
