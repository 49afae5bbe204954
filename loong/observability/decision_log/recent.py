"""The last lines of a decision log, kept in memory for queries."""

from sys import getsizeof

import msgspec

from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.observability.latest import Latest

MAX_BYTES = 2**25
_SLOT_BYTES = 24  # of a line: its place in the queue, and rounding of its memory


class RecentLines:
    """A listener that keeps a bounded number of bytes of encoded lines.

    Objects would slow garbage collection.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._lines = Latest(max_bytes, _size_of_line)
        self._first: bytes | None = None  # with the start of the run

    def __call__(self, _line: Line, encoded: bytes, /) -> None:
        """Keep a line, and drop the oldest ones beyond the bound."""
        if self._first is None:
            self._first = encoded
        else:
            self._lines.append(encoded)

    def written(self) -> tuple[bytes, ...]:
        """Return the lines, with the first line of the run before them."""
        return (*(() if self._first is None else (self._first,)), *self._lines)


def _size_of_line(encoded: bytes) -> int:
    return _SLOT_BYTES + getsizeof(encoded)


def index_of(written: tuple[bytes, ...]) -> LogIndex:
    """Return the index of these lines. It takes a while, and may run in another thread."""
    decoder = msgspec.json.Decoder(Line)
    return indexed(map(decoder.decode, written))
