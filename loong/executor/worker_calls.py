"""Calls to all workers: to compile a grammar, and to start or end a trace."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from loong.core.errors import ClusterError
from loong.core.grammar import Grammar
from loong.executor.command_futures import CommandFutures
from loong.executor.endpoints import WorkerId
from loong.messages.wire import Command, CommandDone, EndTrace, PrepareGrammar, StartTrace

MAX_GRAMMAR_SECONDS = 60.0  # for all workers: one schema takes at most 2 s, but others may come before it
_NOT_AWAITED = 0  # a number of no command whose end is awaited
MAX_TRACE_START_SECONDS = 120.0  # a worker begins between two steps, and no step takes longer


class WorkerCalls:
    """Calls to all of these workers, by commands that `send` takes to them."""

    def __init__(
        self, workers: Iterable[WorkerId], send: Callable[[Iterable[WorkerId], Command], None]
    ) -> None:
        self._workers, self._send = set(workers), send
        self._answers = CommandFutures(self._workers)
        self._first_grammars: Sequence[Grammar] = ()

    def add(self, workers: Iterable[WorkerId]) -> None:
        """Call these workers as well from now on."""
        added = tuple(workers)
        self._workers.update(added)
        self._answers.add(added)
        self._send_first(added)

    def drop(self, workers: Iterable[WorkerId]) -> None:
        """Expect nothing more of lost workers."""
        lost = tuple(workers)
        self._workers.difference_update(lost)
        self._answers.drop(lost)

    def take(self, report: CommandDone) -> None:
        """Note that a worker has carried out a command, or could not."""
        self._answers.take(report)

    def prepare_first_grammars(self, grammars: Sequence[Grammar]) -> None:
        """Let all workers compile these before clients send any, also those workers that come later.

        Nothing waits for them: a client's grammar reports why it cannot be compiled.
        """
        self._first_grammars = grammars
        self._send_first(self._workers)

    def _send_first(self, workers: Iterable[WorkerId]) -> None:
        for grammar in self._first_grammars:
            self._send(workers, PrepareGrammar(_NOT_AWAITED, grammar))

    def prepare_grammar(self, grammar: Grammar) -> asyncio.Future[None]:
        """Let all workers compile a grammar, before a request that needs it is planned.

        The future is done when all have compiled it, and raises `ClusterError` if one cannot, or not in time.
        """
        number, done = self._answers.expect("compile a grammar", MAX_GRAMMAR_SECONDS)
        self._send(self._workers, PrepareGrammar(number, grammar))
        return done

    async def start_traces(self) -> None:
        """Let all workers start a trace, and return once all have started.

        Raises `ClusterError` if one could not, or not in time; then none goes on.
        """
        number, begun = self._answers.expect("begin a trace", MAX_TRACE_START_SECONDS)
        self._send(self._workers, StartTrace(number))
        try:
            await begun
        except ClusterError:
            number, dropped = self._answers.expect("drop a trace", MAX_TRACE_START_SECONDS)
            dropped.add_done_callback(lambda done: done.exception())  # nobody waits for it
            self._send(self._workers, EndTrace(number, None))
            raise

    async def write_traces(self, folder: Path) -> Mapping[WorkerId, Path]:
        """Let all workers end their traces after all submitted work, and wait for the file of each.

        Raises `ClusterError` if one cannot write it.
        """
        files = {(i, rank): folder / f"worker-{i}-{rank}.json" for i, rank in self._workers}
        number, written = self._answers.expect("write its trace")
        for worker_id, path in files.items():
            self._send([worker_id], EndTrace(number, str(path)))
        await written
        return files
