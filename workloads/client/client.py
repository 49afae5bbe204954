"""A load generator: sends on time, streams, and records the answers.

A piece of a stream costs one callback of its connection. So one core sends and reads thousands of streams a
second, and its clock stays accurate (`benchmarks/server/load_generator.py`).
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import msgspec

from loong.foreign_json import NOT_JSON
from loong.workloads.client.backends import ServerApi, ServerResponse, Wire, wire_of
from loong.workloads.client.connections import ConnectionPool
from loong.workloads.client.http_response import HTTPFormatError
from loong.workloads.client.sse import EventDecoder
from loong.workloads.metrics.record import CUT_OFF, RequestRecord
from loong.workloads.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `base_url` has no `/v1`; `timeout` is in seconds, for one request as a whole.

    `extra_body` holds further fields of every request.
    """

    base_url: str
    model: str
    vocab_size: int
    timeout: float = 3600.0
    api_key: str | None = field(default=None, repr=False)
    backend: ServerApi = ServerApi.OPENAI
    extra_body: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class InFlight:
    """Requests in flight: those without any output yet, and those with some.

    Waiting requests are kept by identity, with the time at which they were sent, in seconds of the run.
    """

    waiting: dict[int, tuple[WorkloadRequest, float]] = field(default_factory=dict)
    num_answered: int = 0

    @property
    def num_waiting(self) -> int:
        """Requests without any output yet."""
        return len(self.waiting)


async def run_load(
    target: Target,
    requests: Sequence[WorkloadRequest],
    *,
    max_concurrency: int | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
    is_hopeless: Callable[[float], bool] | None = None,
    in_flight: InFlight | None = None,
) -> list[RequestRecord]:
    """Send every request at its arrival time and return one record each, in the order of `requests`.

    At most `max_concurrency` requests are in flight; one that is due waits for its turn. Failures are
    recorded, never raised. Bodies are encoded before the clock starts, 4 to 8 bytes a token, so that encoding
    long prompts delays nothing. `is_hopeless` is called after every record, with the time of the run. Once it
    returns true, no more is sent and requests in flight are aborted, as their records say. `in_flight` is
    updated during the run.
    """
    wire = wire_of(target.backend)
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    pool = ConnectionPool(target.base_url, headers)
    posts = [pool.request(wire.path, _encode(target, wire, request)) for request in requests]
    run = _Run(
        target,
        wire,
        pool,
        asyncio.Semaphore(max_concurrency or len(requests)),
        on_record,
        is_hopeless,
        in_flight or InFlight(),
    )
    try:
        with _without_collections():
            return await run.send_all(requests, posts)
    finally:
        pool.close()


class _Run:
    """One run against one server: the clock, the connections and the callbacks."""

    def __init__(
        self,
        target: Target,
        wire: Wire,
        pool: ConnectionPool,
        slots: asyncio.Semaphore,
        on_record: Callable[[RequestRecord], None] | None,
        is_hopeless: Callable[[float], bool] | None,
        in_flight: InFlight,
    ) -> None:
        self._target, self._wire, self._pool, self._slots = target, wire, pool, slots
        self._on_record, self._is_hopeless, self._in_flight = on_record, is_hopeless, in_flight
        self._cut_off = asyncio.Event()
        self._start = perf_counter()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return perf_counter() - self._start

    async def send_all(
        self, requests: Sequence[WorkloadRequest], posts: Sequence[bytes]
    ) -> list[RequestRecord]:
        """Send all requests on time, until the end or until the run is hopeless."""
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_on_time(requests, posts, group, tasks))
            watcher = group.create_task(self._give_up(sender, tasks))
            await asyncio.wait([sender])
            if tasks:
                await asyncio.wait(tasks)
            watcher.cancel()
        sent = [None if task.cancelled() else task.result() for task in tasks]  # cancelled before it began
        unsent = [None] * (len(requests) - len(sent))
        return [
            record or self._unsent(request)
            for request, record in zip(requests, [*sent, *unsent], strict=True)
        ]

    async def _send_on_time(
        self,
        requests: Sequence[WorkloadRequest],
        posts: Sequence[bytes],
        group: asyncio.TaskGroup,
        tasks: list[asyncio.Task[RequestRecord]],
    ) -> None:
        held_until = 0.0
        for request, post in zip(requests, posts, strict=True):
            wait = request.arrival_time - self.now()
            if wait > 0:
                await asyncio.sleep(wait)
            is_held_back = self._slots.locked()
            await self._slots.acquire()
            if is_held_back:
                held_until = self.now()
            due_time = max(request.arrival_time, held_until)
            tasks.append(group.create_task(self._send(request, post, due_time)))

    async def _give_up(
        self, sender: asyncio.Task[None], tasks: Sequence[asyncio.Task[RequestRecord]]
    ) -> None:
        await self._cut_off.wait()
        sender.cancel()
        for task in tasks:
            task.cancel()

    async def _send(self, request: WorkloadRequest, post: bytes, due_time: float) -> RequestRecord:
        """Send one request and follow its stream to the end; then release the slot that it holds."""
        sent_time = self.now()
        answer = ServerResponse()
        self._in_flight.waiting[id(request)] = request, sent_time
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._follow(request, post, answer)
        except TimeoutError:
            answer.fail("no end within the time limit")
        except asyncio.CancelledError:
            if not self._cut_off.is_set():
                raise
            answer.fail(CUT_OFF)
        except (HTTPFormatError, OSError, *NOT_JSON) as error:
            answer.fail(f"{type(error).__name__}: {error}")
        finally:
            self._slots.release()
            self._in_flight.num_answered -= bool(answer.token_times)
            self._in_flight.waiting.pop(id(request), None)
        record = RequestRecord(
            request=request,
            due_time=due_time,
            sent_time=sent_time,
            token_times=tuple(answer.token_times),
            finish_time=self.now(),
            usage=answer.usage,
            error=answer.verdict(),
            request_id=answer.request_id,
        )
        self._report(record)
        return record

    async def _follow(self, request: WorkloadRequest, post: bytes, answer: ServerResponse) -> None:
        decoder = EventDecoder()
        take = self._wire.take

        def receive(received: bytes) -> bool:
            now = self.now()
            had_none = not answer.token_times
            for event in decoder.feed(received):
                take(answer, event, now)
            if had_none and answer.token_times:
                del self._in_flight.waiting[id(request)]
                self._in_flight.num_answered += 1
            return answer.error is not None

        status, text = await self._pool.post(post, receive)
        if status != 200:
            answer.fail(f"HTTP {status}: {text}")

    def _report(self, record: RequestRecord) -> None:
        if self._on_record is not None and not self._cut_off.is_set():
            self._on_record(record)
        if self._is_hopeless is not None and self._is_hopeless(self.now()):
            self._cut_off.set()

    def _unsent(self, request: WorkloadRequest) -> RequestRecord:
        time = request.arrival_time
        return RequestRecord(request, time, time, (), self.now(), None, CUT_OFF)


def _encode(target: Target, wire: Wire, request: WorkloadRequest) -> bytes:
    prompt = request.prompt_token_ids(target.vocab_size)
    return msgspec.json.encode(wire.body(target.model, request, prompt, target.extra_body))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector, which would pause the load generator in the middle of a run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
