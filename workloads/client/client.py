"""A load generator: sends on time, streams, and records the answers.

A piece of a stream costs one callback of its connection. So one core sends and reads thousands of streams a
second, and its clock stays accurate (`benchmarks/server/load_generator.py`).
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import msgspec

from loong.foreign_json import NOT_JSON
from loong.workloads.client.backends import ServerApi, ServerResponse, Wire, wire_of
from loong.workloads.client.connections import ConnectionPool
from loong.workloads.client.http_response import HTTPFormatError
from loong.workloads.client.sse import EventDecoder
from loong.workloads.metrics.record import CUT_OFF, RequestRecord
from loong.workloads.request import WorkloadRequest
from loong.workloads.sessions import Places, places_of_sessions

TURN_FAILED = "not sent: the turn before it failed"


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

    A later turn of a session is sent its think time after the answer before it, which becomes a part of its
    prompt. Turns after a failed one fail without being sent.

    At most `max_concurrency` requests are in flight; one that is due waits for its turn. Failures are
    recorded, never raised. Bodies are encoded before the clock starts, 4 to 8 bytes a token, so that encoding
    long prompts delays nothing; those of later turns during the think time. `is_hopeless` is called after
    every record, with the time of the run. Once it returns true, no more is sent and requests in flight are
    aborted, as their records say. `in_flight` is updated during the run.
    """
    wire = wire_of(target.backend)
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    pool = ConnectionPool(target.base_url, headers)
    sessions = places_of_sessions(requests)
    firsts = [requests[places[0]] for places in sessions]
    posts = [_post(target, wire, pool, first, first.prompt_token_ids(target.vocab_size)) for first in firsts]
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
            return await run.send_all(requests, sessions, posts)
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
        self._records: dict[int, RequestRecord] = {}  # by the place of the request
        self._cut_off = asyncio.Event()
        self._start = perf_counter()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return perf_counter() - self._start

    async def send_all(
        self, requests: Sequence[WorkloadRequest], sessions: Sequence[Places], posts: Sequence[bytes]
    ) -> list[RequestRecord]:
        """Send all requests on time, until the end or until the run is hopeless.

        `posts` are the first turns of the sessions.
        """
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_on_time(requests, sessions, posts, group, tasks))
            watcher = group.create_task(self._give_up(sender, tasks))
            await asyncio.wait([sender])
            if tasks:
                await asyncio.wait(tasks)
            watcher.cancel()
        return [
            self._records.get(place) or self._unsent(request, CUT_OFF)
            for place, request in enumerate(requests)
        ]

    async def _send_on_time(
        self,
        requests: Sequence[WorkloadRequest],
        sessions: Sequence[Places],
        posts: Sequence[bytes],
        group: asyncio.TaskGroup,
        tasks: list[asyncio.Task[None]],
    ) -> None:
        held_until = 0.0
        for places, post in zip(sessions, posts, strict=True):
            turns = [requests[place] for place in places]
            let_go = await self._take_slot(turns[0].arrival_time)
            if let_go > turns[0].arrival_time:
                held_until = let_go
            session = self._send_session(places, turns, post, max(let_go, held_until))
            tasks.append(group.create_task(session))

    async def _take_slot(self, due_time: float) -> float:
        """Wait until a request is due and may be in flight; return when that was."""
        wait = due_time - self.now()
        if wait > 0:
            await asyncio.sleep(wait)
        is_held_back = self._slots.locked()
        await self._slots.acquire()
        return self.now() if is_held_back else due_time

    async def _send_session(
        self, places: Places, turns: Sequence[WorkloadRequest], post: bytes, due_time: float
    ) -> None:
        """Send the turns of a session, the first as `post`, each after the answer to the one before."""
        request, tokens, hindrance = turns[0], list[int](), None
        record, answer = await self._send(request, post, due_time)
        self._records[places[0]] = record
        for place, turn in zip(places[1:], turns[1:], strict=True):
            hindrance = hindrance or _hindrance(record, answer)
            if hindrance is not None:
                self._records[place] = self._unsent(turn, hindrance)
                self._report(self._records[place])
                continue
            due_time = record.finish_time + turn.shape.think_time
            tokens = tokens or request.prompt_token_ids(self._target.vocab_size)
            request = replace(turn, shape=turn.shape.after(request.shape, len(answer.token_ids)))
            tokens = request.prompt_token_ids(self._target.vocab_size, [*tokens, *answer.token_ids])
            post = _post(self._target, self._wire, self._pool, request, tokens)
            record, answer = await self._send(request, post, await self._take_slot(due_time))
            self._records[place] = record

    async def _give_up(self, sender: asyncio.Task[None], tasks: Sequence[asyncio.Task[None]]) -> None:
        await self._cut_off.wait()
        sender.cancel()
        for task in tasks:
            task.cancel()

    async def _send(
        self, request: WorkloadRequest, post: bytes, due_time: float
    ) -> tuple[RequestRecord, ServerResponse]:
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
        return record, answer

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

    def _unsent(self, request: WorkloadRequest, error: str) -> RequestRecord:
        time = request.arrival_time
        if request.shape.is_follower:
            time = max(time, self.now())
        return RequestRecord(request, time, time, (), self.now(), None, error)


def _post(
    target: Target, wire: Wire, pool: ConnectionPool, request: WorkloadRequest, prompt: list[int]
) -> bytes:
    body = msgspec.json.encode(wire.body(target.model, request, prompt, target.extra_body))
    return pool.request(wire.path, body)


def _hindrance(record: RequestRecord, answer: ServerResponse) -> str | None:
    """Return why no turn can follow an answer; None if one can."""
    if record.error is not None:
        return CUT_OFF if record.error == CUT_OFF else TURN_FAILED
    num_named, num_tokens = len(answer.token_ids), record.num_output_tokens
    if num_named != num_tokens:
        return f"not sent: the server names {num_named} of the {num_tokens} tokens of the answer before it"
    return None


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
