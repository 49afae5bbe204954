"""Grammars that all workers make before the requests come that need them."""

import asyncio
from collections.abc import Iterable
from itertools import count

from loong.core.errors import ClusterError
from loong.executor.endpoints import WorkerId
from loong.wire import GrammarDone

MAX_SECONDS = 60.0  # for all workers: one schema takes 2 s at most, but others may come before it


class Grammars:
    """Which workers have yet to tell of which grammar."""

    def __init__(self, workers: Iterable[WorkerId], max_seconds: float = MAX_SECONDS) -> None:
        self._workers, self._max_seconds = frozenset(workers), max_seconds
        self._numbers = count(1)
        self._waiting: dict[int, tuple[set[WorkerId], asyncio.Future[None]]] = {}

    def begin(self) -> tuple[int, asyncio.Future[None]]:
        """A number for the workers to tell, and what is done when all have.

        It raises `ClusterError` if one cannot make the grammar, or not in time.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting[number] = set(self._workers), done
        timer = loop.call_later(self._max_seconds, self._give_up, number)
        done.add_done_callback(lambda _: timer.cancel())
        return number, done

    def take(self, report: GrammarDone) -> None:
        """One worker has made a grammar, or says why not."""
        if report.number not in self._waiting:
            return  # it was given up
        not_done, done = self._waiting[report.number]
        not_done.discard((report.instance_id, report.tp_rank))
        if report.failure or not not_done:
            del self._waiting[report.number]
            if report.failure:
                done.set_exception(ClusterError(f"no grammar could be made: {report.failure}"))
            else:
                done.set_result(None)

    def _give_up(self, number: int) -> None:
        if number not in self._waiting:
            return  # the last worker told in this very turn of the loop
        not_done, done = self._waiting.pop(number)
        late = sorted({instance_id for instance_id, _ in not_done})
        message = f"instances {late} made no grammar of the schema within {self._max_seconds:g} s"
        done.set_exception(ClusterError(message))
