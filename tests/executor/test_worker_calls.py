"""Commands to all workers, also to those that join later."""

from collections.abc import Iterable

from loong.core.grammar import FIRST_GRAMMARS
from loong.executor.endpoints import WorkerId
from loong.executor.worker_calls import WorkerCalls
from loong.messages.wire import Command, CommandDone, PrepareGrammar


async def test_workers_that_join_later_compile_the_first_grammars_too() -> None:
    sent: list[tuple[WorkerId, Command]] = []

    def send(workers: Iterable[WorkerId], command: Command) -> None:
        sent.extend((worker, command) for worker in workers)

    calls = WorkerCalls([(0, 0)], send)
    calls.add([(1, 0)])
    assert sent == []
    calls.prepare_first_grammars(FIRST_GRAMMARS)
    calls.add([(2, 0)])
    found = {(worker, command.grammar) for worker, command in sent if isinstance(command, PrepareGrammar)}
    assert found == {((i, 0), grammar) for i in range(3) for grammar in FIRST_GRAMMARS}
    calls.take(CommandDone(0, 0, 0, "it has no tokenizer"))  # awaited by nobody
