"""Progress bars of a benchmark on the terminal: requests sent, answered and in time so far."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from tqdm import tqdm

from loong.workloads.client.client import InFlight
from loong.workloads.metrics.metrics import is_attained
from loong.workloads.metrics.misses import Misses
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.metrics.slo import LimitsOf
from loong.workloads.request import WorkloadRequest

REFRESH_SECONDS = 0.5


class RunProgress:
    """The requests of one run so far: those that have ended, and how many of them met their SLO."""

    def __init__(self, limits_of: LimitsOf, misses: Misses | None = None) -> None:
        self.records: list[RequestRecord] = []
        self.in_flight = InFlight()
        self._num_missed = 0
        self._limits_of, self._misses = limits_of, misses or Misses()
        self._late: set[int] = set()
        self._next_look = 0.0

    def take(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.records.append(record)
        if not is_attained(record, self._limits_of):
            self._num_missed += 1
            self._miss(record.request)

    def is_hopeless(self, now: float) -> bool:
        """Return whether more requests have certainly missed than may.

        Also those count that wait for a first token beyond the bound. As these may be many, they are looked
        at twice a second only; `now` is in seconds of the run.
        """
        if now >= self._next_look:
            self._next_look = now + REFRESH_SECONDS
            for request, sent_time in list(self.in_flight.waiting.values()):
                if now - sent_time > self._limits_of(request.num_prompt_tokens).ttft:
                    self._miss(request)
        return self._misses.is_hopeless

    def _miss(self, request: WorkloadRequest) -> None:
        if id(request) not in self._late:
            self._late.add(id(request))
            self._misses.add(request.num_prompt_tokens)

    def words(self) -> str:
        """Return how many run and wait, and the attainment."""
        flight, num_ended = self.in_flight, len(self.records)
        words = f"{flight.num_answered} running, {flight.num_waiting} waiting"
        return f"{words}, attained {1 - self._num_missed / num_ended:.0%}" if num_ended else words


@asynccontextmanager
async def run_bar(
    progress: RunProgress, num_requests: int, *, is_kept: bool
) -> AsyncIterator[Callable[[RequestRecord], None]]:
    """Show a bar of a run while it lasts, and yield what takes its records; `is_kept` leaves it there."""
    with tqdm(total=num_requests, unit="req", disable=None, leave=is_kept) as bar:

        def take(record: RequestRecord) -> None:
            progress.take(record)
            bar.set_postfix_str(progress.words(), refresh=False)
            bar.update()

        async def refresh() -> None:
            while not bar.disable:
                await asyncio.sleep(REFRESH_SECONDS)
                bar.set_postfix_str(progress.words())

        refreshing = asyncio.create_task(refresh())
        try:
            yield take
        finally:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing


@contextmanager
def short_bar(what: str, num_requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Show a bar of requests that are not measured, which disappears at the end.

    Yield the function that counts them.
    """
    with tqdm(total=num_requests, unit="req", desc=what, disable=None, leave=False) as bar:

        def count_one(_record: RequestRecord) -> None:
            bar.update()

        yield count_one
