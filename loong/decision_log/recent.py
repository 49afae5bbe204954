"""The last lines of a decision log, kept in memory to be asked about."""

from collections import deque

import msgspec

from loong.decision_log.lines import Line
from loong.decision_log.story.index import LogIndex, indexed

MAX_BYTES = 2**25


class RecentLines:
    """A listener that keeps so many bytes of lines, as written: objects would burden garbage collection."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._first: bytes | None = None  # that says when the run began
        self._num_bytes = 0

    def __call__(self, _line: Line, encoded: bytes, /) -> None:
        """Keep a line, in the place of the oldest ones."""
        if self._first is None:
            self._first = encoded
            return
        self._lines.append(encoded)
        self._num_bytes += len(encoded)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._lines.popleft())

    def written(self) -> tuple[bytes, ...]:
        """The lines now, the run's first one before them."""
        return (*(() if self._first is None else (self._first,)), *self._lines)


def index_of(written: tuple[bytes, ...]) -> LogIndex:
    """What these lines say. It takes a while, but may be done in another thread."""
    decoder = msgspec.json.Decoder(Line)
    return indexed(map(decoder.decode, written))
