"""Numbers of the whole cluster over minutes and hours, sampled at a constant interval."""

import asyncio
from array import array
from collections.abc import AsyncIterator

from aiohttp import web

from loong.core.snapshot import Snapshot
from loong.observability.decision_log.runs import RequestRun
from loong.server.cluster import CLUSTER
from loong.server.metrics.request_observers import RequestObservers

SAMPLE_SECONDS = 2.0
MAX_BYTES = 2**17  # of samples, for an hour and a half
NUM_FIELDS = 7


class Past:
    """The last samples, and the counts of ended requests.

    A sample is: the time; tokens computed and tokens produced since the start; waiting and running requests.
    Then, of the requests ended since the start, those with a token, and those that met their targets.
    """

    def __init__(self, request_observers: RequestObservers, max_bytes: int = MAX_BYTES) -> None:
        self._request_observers = request_observers
        self._values = array("d")
        self._max_values = max_bytes // self._values.itemsize // NUM_FIELDS * NUM_FIELDS
        self.num_judged = self.num_met = 0
        request_observers.runs.subscribe(self._judge)

    def sample(self, snapshot: Snapshot) -> None:
        """Add a sample, and drop the oldest ones beyond the bound."""
        stats = snapshot.stats
        self._values.extend(
            (
                snapshot.now,
                stats.num_computed_tokens,
                stats.num_output_tokens,
                len(snapshot.waiting) + len(snapshot.following),
                len(snapshot.running),
                self.num_judged,
                self.num_met,
            )
        )
        del self._values[: max(len(self._values) - self._max_values, 0)]

    def samples(self) -> list[tuple[float, ...]]:
        """Return the samples, oldest first."""
        values = self._values
        return [tuple(values[start : start + NUM_FIELDS]) for start in range(0, len(values), NUM_FIELDS)]

    def _judge(self, run: RequestRun) -> None:
        if run.ttft is None:
            return
        target = self._request_observers.target_of(run)
        self.num_judged += 1
        self.num_met += run.ttft <= target.ttft and (run.tpot or 0.0) <= target.tpot


PAST = web.AppKey("past", Past)


async def keep_past(app: web.Application) -> AsyncIterator[None]:
    """Take samples while the application runs."""

    async def keep() -> None:
        while True:
            app[PAST].sample(app[CLUSTER].engine.snapshot())
            await asyncio.sleep(SAMPLE_SECONDS)

    keeping = asyncio.create_task(keep())
    yield
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
