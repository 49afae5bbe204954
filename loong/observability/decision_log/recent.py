"""The last lines of a decision log, kept in memory to be asked about."""

from sys import getsizeof

import msgspec

from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.observability.latest import Latest

MAX_BYTES = 2**25
_SLOT_BYTES = 24  # of a line in the queue, and of what its memory is rounded up by


class RecentLines:
    """A listener that keeps so many bytes of lines, as written: objects would burden garbage collection."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._lines = Latest(max_bytes, _size_of_line)
        self._first: bytes | None = None  # that says when the run began

    def __call__(self, _line: Line, encoded: bytes, /) -> None:
        """Keep a line, in the place of the oldest ones."""
        if self._first is None:
            self._first = encoded
        else:
            self._lines.append(encoded)

    def written(self) -> tuple[bytes, ...]:
        """The lines now, the run's first one before them."""
        return (*(() if self._first is None else (self._first,)), *self._lines)


def _size_of_line(encoded: bytes) -> int:
    return _SLOT_BYTES + getsizeof(encoded)


def index_of(written: tuple[bytes, ...]) -> LogIndex:
    """What these lines say. It takes a while, but may be done in another thread."""
    decoder = msgspec.json.Decoder(Line)
    return indexed(map(decoder.decode, written))
