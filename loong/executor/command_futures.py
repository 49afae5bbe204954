"""Futures of numbered commands, each done once all workers have reported it."""

import asyncio
from collections.abc import Iterable
from itertools import count

from loong.core.errors import ClusterError
from loong.executor.endpoints import WorkerId
from loong.messages.wire import CommandDone


class CommandFutures:
    """The numbered commands in progress, each with the workers that have not reported it as done."""

    def __init__(self, workers: Iterable[WorkerId]) -> None:
        self._workers = frozenset(workers)
        self._numbers = count(1)
        self._awaited: dict[int, tuple[str, set[WorkerId], asyncio.Future[None]]] = {}

    def expect(self, what: str, max_seconds: float | None = None) -> tuple[int, asyncio.Future[None]]:
        """Return a number for a command, and a future that is done when all workers have reported it.

        The future raises `ClusterError` if one cannot do it, or not within `max_seconds`; None is no bound.
        `what` completes the sentence that begins with "instance 1 could not".
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._workers:  # all are lost; those that join do it when it is needed
            done.set_result(None)
            return number, done
        self._awaited[number] = what, set(self._workers), done
        if max_seconds is not None:
            timer = loop.call_later(max_seconds, self._give_up, number, max_seconds)
            done.add_done_callback(lambda _: timer.cancel())
        return number, done

    def take(self, report: CommandDone) -> None:
        """Record that a worker has carried out a command, or could not."""
        if report.number not in self._awaited:
            return  # the command was abandoned
        what, late, done = self._awaited[report.number]
        late.discard((report.instance_id, report.tp_rank))
        if late and not report.failure:
            return
        del self._awaited[report.number]
        if done.done():
            return  # nothing awaits it any more
        if report.failure:
            message = f"instance {report.instance_id} could not {what}: {report.failure}"
            done.set_exception(ClusterError(message))
        else:
            done.set_result(None)

    def drop(self, workers: Iterable[WorkerId]) -> None:
        """Expect nothing more of lost workers."""
        lost = frozenset(workers)
        self._workers -= lost
        for number, (_, late, done) in tuple(self._awaited.items()):
            late -= lost
            if not late:
                del self._awaited[number]
                if not done.done():
                    done.set_result(None)

    def add(self, workers: Iterable[WorkerId]) -> None:
        """Expect the commands to come to be carried out by these as well."""
        self._workers |= frozenset(workers)

    def _give_up(self, number: int, max_seconds: float) -> None:
        if number not in self._awaited:
            return  # the last worker reported in this very turn of the loop
        what, late, done = self._awaited.pop(number)
        if not done.done():
            instance_ids = sorted({instance_id for instance_id, _ in late})
            message = f"instances {instance_ids} could not {what} within {max_seconds:g} s"
            done.set_exception(ClusterError(message))
