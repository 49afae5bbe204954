"""The index of the recent decisions, which all reports that wait for one share."""

import asyncio

from loong.observability.decision_log.recent import RecentLines, index_of
from loong.observability.decision_log.story.index import LogIndex


class SharedIndex:
    """Makes one index at a time, in a thread: each reads the whole log."""

    def __init__(self, recent: RecentLines) -> None:
        self._recent = recent
        self._lock = asyncio.Lock()
        self._index: LogIndex | None = None
        self._num_begun = self._number = 0  # of the last one begun, and of `_index`
        self._num_waiting = 0

    async def get(self) -> LogIndex:
        """Return an index of all lines until now, or until later. It is kept while others wait for one."""
        needed = self._num_begun + 1
        self._num_waiting += 1
        try:
            async with self._lock:
                if self._index is None or self._number < needed:
                    self._num_begun = number = self._num_begun + 1
                    written = self._recent.written()  # in this thread, so that no line is added meanwhile
                    self._index = await asyncio.to_thread(index_of, written)
                    self._number = number
                return self._index
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._index = None
