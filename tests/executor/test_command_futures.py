"""Commands that all workers carry out, and their reports."""

import asyncio

import pytest

from loong.core.errors import ClusterError
from loong.executor.command_futures import CommandFutures
from loong.messages.wire import CommandDone

WORKERS = ((0, 0), (0, 1), (1, 0), (1, 1))


async def test_a_command_is_done_when_every_worker_has_reported_it() -> None:
    answers = CommandFutures(WORKERS)
    (first, one), (second, other) = answers.expect("begin"), answers.expect("end")
    for instance_id, tp_rank in WORKERS:
        assert not one.done()
        answers.take(CommandDone(first, instance_id, tp_rank))
        answers.take(CommandDone(first, instance_id, tp_rank))  # reported twice counts once
    await one
    assert not other.done()
    for instance_id, tp_rank in WORKERS:
        answers.take(CommandDone(second, instance_id, tp_rank))
    await other


async def test_one_worker_that_cannot_is_enough() -> None:
    answers = CommandFutures(WORKERS)
    number, done = answers.expect("begin a trace")
    for instance_id, tp_rank in WORKERS:
        answers.take(CommandDone(number, instance_id, tp_rank, "no room" if instance_id else ""))
    with pytest.raises(ClusterError, match=r"^instance 1 could not begin a trace: no room$"):
        await done


async def test_a_report_that_comes_as_time_runs_out_counts() -> None:
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    answers = CommandFutures([(0, 0)])
    number, done = answers.expect("begin", max_seconds=0.0)
    loop.call_soon(answers.take, CommandDone(number, 0, 0))
    await done
    await asyncio.sleep(0)
    assert not errors


async def test_a_command_that_is_not_done_in_time_is_given_up_and_names_who_is_late() -> None:
    answers = CommandFutures(WORKERS)
    number, done = answers.expect("begin a trace", max_seconds=0.0)
    answers.take(CommandDone(number, 0, 0))
    answers.take(CommandDone(number, 0, 1))
    with pytest.raises(ClusterError, match=r"^instances \[1\] could not begin a trace within 0 s$"):
        await done
    answers.take(CommandDone(number, 1, 0))  # late, which is no error


async def test_a_command_that_nobody_waits_for_any_more_is_no_error() -> None:
    answers = CommandFutures([(0, 0)])
    for failure in ("", "no room"):
        number, done = answers.expect("begin")
        done.cancel()
        answers.take(CommandDone(number, 0, 0, failure))
