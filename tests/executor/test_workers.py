"""Reports of workers, through a real socket, become events or an error."""

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from reporting_workers import WORKERS, executor_and_reports

from loong.core.errors import ClusterError, InvalidEventError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Drained,
    Event,
    ProducedToken,
    RequestAborted,
    TokensProduced,
)
from loong.core.instance import ESPGroup
from loong.core.instructions import RunBatch
from loong.core.plan import BatchPlan
from loong.executor.lookahead import LookaheadMargin
from loong.messages.wire import (
    BatchBegun,
    BatchDone,
    CommandDone,
    Heartbeat,
    MigrationDone,
    Report,
    StepDone,
    WorkerFailed,
    WorkerReady,
    encode,
)
from loong.scheduler.cost.cost_model import DEFAULT_HOST


async def reports_of(num_steps: Iterable[int]) -> Sequence[Event]:
    """Return the executor's events, or raise, when workers of batch 7 have taken these numbers of steps."""
    with executor_and_reports() as (executor, reports):
        executor.submit([RunBatch(7, BatchPlan(ESPGroup((0, 1)), (), ()), ())])
        for (instance_id, tp_rank), count in zip(WORKERS, num_steps, strict=True):
            reports.send(encode(BatchDone(7, instance_id, tp_rank, count)))
        reading, events = asyncio.create_task(executor.read_reports()), list[Event]()
        while not any(isinstance(event, BatchFinished) for event in events):
            reporting = asyncio.create_task(executor.next_events())
            await asyncio.wait((reporting, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reporting.done():
                reporting.cancel()
                await reading
            events += reporting.result()
        reading.cancel()
        return events


async def steps_reported(bursts: Iterable[int]) -> list[int]:
    """Return the steps that an executor reports when workers report this many at once, wait by wait."""
    with executor_and_reports() as (executor, reports):
        executor.submit([batch(7, 0, 1)])
        reading = asyncio.create_task(executor.read_reports())
        reported: list[int] = []
        for count in bursts:
            stop = len(reported) + count
            for step in range(len(reported), stop):
                reports.send(encode(StepDone(7, step, ())))
            while len(reported) < stop:
                for event in await executor.next_events():
                    if isinstance(event, BatchStarted):
                        continue
                    assert isinstance(event, TokensProduced)
                    reported.append(event.step)
        reading.cancel()
        await asyncio.wait([reading])
        return reported


def test_every_report_is_reported_in_its_order_in_whatever_bursts_they_come() -> None:
    assert asyncio.run(steps_reported((1, 100, 1, 1, 30))) == list(range(133))


async def test_what_masters_report_together_of_one_step_is_one_event() -> None:
    tokens = {master: (ProducedToken(master, 5),) for master in "abcdef"}
    reported = ((7, 0, "a"), (7, 0, "b"), (7, 1, "c"), (8, 1, "d"), (7, 1, "e"), (7, 1, "f"))
    with executor_and_reports() as (executor, _):
        executor.submit([batch(7, 0, 1), batch(8, 0, 1)])
        for batch_id, step, master in reported:
            executor.receive(encode(StepDone(batch_id, step, tokens[master])))
        events = [event for event in await executor.next_events() if isinstance(event, TokensProduced)]
    masters = [(e.batch_id, e.step, "".join(token.request_id for token in e.tokens)) for e in events]
    assert masters == [(7, 0, "ab"), (7, 1, "c"), (8, 1, "d"), (7, 1, "ef")]
    assert [event.time for event in events] == sorted(event.time for event in events)


async def test_tokens_that_come_with_the_end_of_a_batch_are_reported_before_it_as_each_worker_ends() -> None:
    tokens = {(0, 0): (ProducedToken("a", 5),), (1, 0): (ProducedToken("b", 6), ProducedToken("c", 7))}
    with executor_and_reports() as (executor, _):
        executor.submit([RunBatch(7, BatchPlan(ESPGroup((0, 1)), (), ()), ())])
        for number, worker_id in enumerate(WORKERS):
            executor.post(RequestAborted(0.0, str(number)))
            if worker_id in tokens:
                executor.receive(encode(StepDone(7, 0, tokens[worker_id], is_last=True)))
            executor.receive(encode(BatchDone(7, *worker_id, 1)))
        *events, finished = await executor.next_events()
    assert [event.batch_id for event in events if isinstance(event, BatchStarted)] == [7]
    reported = [event for event in events if isinstance(event, TokensProduced)]
    assert {(event.batch_id, event.step) for event in reported} == {(7, 0)}
    assert [[token.request_id for token in event.tokens] for event in reported] == [["a"], ["b", "c"]]
    assert events[2] == reported[0]  # before the next worker has ended
    assert isinstance(finished, BatchFinished)


@pytest.mark.parametrize(
    "report",
    [
        Heartbeat(2, 0),
        WorkerReady(0, 2),
        WorkerFailed(-1, 0, "of nobody"),
        CommandDone(1, 2**64 - 1, 0),
        StepDone(8, 0, ()),
        BatchBegun(8, 0, 0),
        BatchBegun(7, 0, 0),  # which has reported its end
        BatchDone(8, 0, 0, 1),
        BatchDone(7, 1, 0, 1),  # which is not in the batch
        BatchDone(7, 0, 0, 1),  # which has reported it
        MigrationDone(7, 0, 0, is_committed=True),
    ],
    ids=repr,
)
async def test_a_report_of_a_worker_or_of_work_that_there_is_not_is_counted_and_dropped(
    report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    with executor_and_reports() as (executor, _):
        executor.submit([batch(7, 0)])
        executor.receive(encode(BatchDone(7, 0, 0, 1)))
        for _ in range(3):
            executor.receive(encode(report))
        executor.receive(encode(BatchDone(7, 0, 1, 1)))
        executor.post(Drained())
        assert [type(event) for event in await executor.next_events()] == [BatchStarted, BatchFinished]
        assert executor.num_stray_frames == 3
    assert [type(report).__name__ in message for message in caplog.messages] == [True]


async def test_frames_that_workers_dropped_are_counted_with_ours() -> None:
    with executor_and_reports() as (executor, _):
        for worker_id in WORKERS:
            for num_stray_frames in (1, 5):  # since its start
                executor.receive(encode(Heartbeat(*worker_id, num_stray_frames)))
        executor.receive(b"no report")
        assert executor.num_stray_frames == 5 * len(WORKERS) + 1


async def test_an_error_is_raised_after_the_events_before_it() -> None:
    with executor_and_reports() as (executor, _):
        first, second, late = (RequestAborted(0.0, request_id) for request_id in "abc")
        executor.post(first)
        executor.post(second)
        executor.fail(ClusterError("it fell over"))
        executor.post(late)
        assert await executor.next_events() == [first, second]
        for _ in range(2):
            with pytest.raises(ClusterError, match="it fell over"):
                await executor.next_events()


async def test_there_are_no_events_after_the_last() -> None:
    with executor_and_reports() as (executor, _):
        executor.post(RequestAborted(0.0, "a"))
        executor.post(Drained())
        assert len(await executor.next_events()) == 1
        assert not await executor.next_events()


def test_a_batch_is_finished_when_all_its_workers_are() -> None:
    [started, event] = asyncio.run(reports_of((5, 5, 5, 5)))
    assert isinstance(started, BatchStarted)  # for the worker that did not report it
    assert isinstance(event, BatchFinished)
    assert (event.batch_id, event.num_steps) == (7, 5)


async def test_a_batch_starts_when_the_last_instance_has_begun_it() -> None:
    with executor_and_reports() as (executor, _):
        executor.submit([batch(7, 0, 1)])
        executor.receive(encode(BatchBegun(7, 0, 0)))
        executor.post(RequestAborted(0.0, "a"))
        executor.receive(encode(BatchBegun(7, 1, 0)))
        aborted, started = await executor.next_events()
    assert isinstance(aborted, RequestAborted)
    assert isinstance(started, BatchStarted)
    assert started.batch_id == 7


async def test_a_batch_has_started_before_anything_comes_of_it_in_whatever_order_reports_are_read() -> None:
    with executor_and_reports() as (executor, _):
        executor.submit([batch(7, 0, 1)])
        executor.receive(encode(BatchBegun(7, 1, 0)))
        executor.receive(encode(StepDone(7, 0, ())))
        executor.receive(encode(BatchBegun(7, 0, 0)))
        for worker_id in WORKERS:
            executor.receive(encode(BatchDone(7, *worker_id, 1)))
        executor.receive(encode(BatchBegun(7, 0, 0)))  # of a batch that has ended
        events = await executor.next_events()
    assert [type(event) for event in events] == [BatchStarted, TokensProduced, BatchFinished]


@pytest.mark.parametrize("odd", range(1, len(WORKERS)))
def test_workers_that_took_different_numbers_of_steps_are_an_error(odd: int) -> None:
    num_steps = [5] * len(WORKERS)
    num_steps[odd] = 6
    instance_id, tp_rank = WORKERS[odd]
    message = (
        f"batch 7 took 5 steps on rank 0 of instance 0, but 6 on rank {tp_rank} of instance {instance_id}"
    )
    with pytest.raises(InvalidEventError, match=message):
        asyncio.run(reports_of(num_steps))


def batch(batch_id: int, *group: int, predicted_time: float | None = 0.0) -> RunBatch:
    return RunBatch(batch_id, BatchPlan(ESPGroup(group), (), (), predicted_time=predicted_time), ())


async def test_a_batch_starts_after_those_that_its_instances_were_reported_before() -> None:
    with executor_and_reports() as (executor, _):
        executor.submit([batch(1, 0), batch(2, 0, 1)])
        executor.receive(encode(StepDone(2, 0, ())))  # of instance 1, before 0 has said anything
        executor.receive(encode(BatchBegun(1, 0, 0)))
        events = [event for event in await executor.next_events() if isinstance(event, BatchStarted)]
    assert [event.batch_id for event in events] == [1, 2]


async def test_an_end_is_predicted_once_a_batch_has_begun_and_only_before_it_comes() -> None:
    with executor_and_reports(LookaheadMargin.on(DEFAULT_HOST)) as (executor, _):
        executor.submit([batch(1, 0), batch(2, 0, 1), batch(3, 1, predicted_time=3600.0)])
        (predicted,) = await executor.next_events()
        assert isinstance(predicted, BatchEndPredicted)
        assert predicted.batch_id == 1  # the others wait for it, and for one another
        for rank in (0, 1):
            executor.receive(encode(BatchDone(1, 0, rank, 1)))
        assert [type(event) for event in await executor.next_events()] == [BatchStarted, BatchFinished]
        (predicted,) = await executor.next_events()
        assert isinstance(predicted, BatchEndPredicted)
        assert predicted.batch_id == 2
        for worker_id in WORKERS:
            executor.receive(encode(BatchDone(2, *worker_id, 1)))
        for rank in (0, 1):  # long before its end
            executor.receive(encode(BatchDone(3, 1, rank, 1)))
        executor.post(Drained())
        finished = await executor.next_events()
        assert [type(event) for event in finished] == [BatchStarted, BatchFinished] * 2
        assert not await executor.next_events()


@pytest.mark.parametrize(
    ("lookahead", "kinds"), [(LookaheadMargin.on(DEFAULT_HOST), [BatchEndPredicted]), (None, [])]
)
async def test_nothing_is_predicted_without_a_margin(
    lookahead: LookaheadMargin | None, kinds: list[type[Event]]
) -> None:
    with executor_and_reports(lookahead) as (executor, _):
        executor.submit([batch(1, 0)])
        for _ in range(3):  # turns of the event loop
            await asyncio.sleep(0)
        executor.post(Drained())
        assert [type(event) for event in await executor.next_events()] == kinds
