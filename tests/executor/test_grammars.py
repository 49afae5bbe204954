"""Which grammars all workers have, by what they report."""

import asyncio

import pytest

from loong.core.errors import ClusterError
from loong.executor.grammars import Grammars
from loong.wire import GrammarDone

WORKERS = ((0, 0), (0, 1), (1, 0), (1, 1))


async def test_a_grammar_is_there_when_every_worker_has_it() -> None:
    grammars = Grammars(WORKERS)
    (first, one), (second, other) = grammars.begin(), grammars.begin()
    for instance_id, tp_rank in WORKERS:
        assert not one.done()
        grammars.take(GrammarDone(first, instance_id, tp_rank))
        grammars.take(GrammarDone(first, instance_id, tp_rank))  # told twice is told once
    await one
    assert not other.done()
    for instance_id, tp_rank in WORKERS:
        grammars.take(GrammarDone(second, instance_id, tp_rank))
    await other


async def test_one_worker_that_cannot_make_a_grammar_is_enough() -> None:
    grammars = Grammars(WORKERS)
    number, done = grammars.begin()
    for instance_id, tp_rank in WORKERS:
        grammars.take(GrammarDone(number, instance_id, tp_rank, "no room" if instance_id else ""))
    with pytest.raises(ClusterError, match="no room"):
        await done


async def test_a_grammar_that_comes_as_time_runs_out_is_there() -> None:
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    grammars = Grammars([(0, 0)], max_seconds=0.0)
    number, done = grammars.begin()
    loop.call_soon(grammars.take, GrammarDone(number, 0, 0))
    await done
    await asyncio.sleep(0)
    assert not errors


async def test_a_grammar_that_does_not_come_in_time_is_given_up_and_may_come_late() -> None:
    grammars = Grammars(WORKERS, max_seconds=0.0)
    number, done = grammars.begin()
    grammars.take(GrammarDone(number, 0, 0))
    grammars.take(GrammarDone(number, 0, 1))
    with pytest.raises(ClusterError, match=r"instances \[1\] made no grammar .* within 0 s"):
        await done
    grammars.take(GrammarDone(number, 1, 0))
