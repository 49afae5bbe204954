"""A load generator for `/v1/completions`: sends on time, streams, and records what came back."""

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from loong.workloads.record import RequestRecord, Usage
from loong.workloads.request import WorkloadRequest
from loong.workloads.sse import EventDecoder

MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `base_url` has no `/v1`; `timeout` is in seconds, for one request as a whole."""

    base_url: str
    model: str
    vocab_size: int
    timeout: float = 3600.0
    api_key: str | None = field(default=None, repr=False)


async def run_load(
    target: Target,
    requests: Sequence[WorkloadRequest],
    *,
    max_concurrency: int | None = None,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send every request at its arrival time and return one record each, in the order of `requests`.

    At most `max_concurrency` requests are in flight; one that is due waits for its turn. Failures are
    recorded, never raised. Bodies are encoded before the clock starts, 4 to 8 bytes a token, so that
    encoding long prompts delays nothing.
    """
    bodies = [_encode(target, request) for request in requests]
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    # A kept-alive connection may be closed by the server just as it is used again; a new one is not.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=target.timeout)
    tasks = []
    held_until = 0.0
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session,
        asyncio.TaskGroup() as group,
    ):
        exchange = _Exchange(session, f"{target.base_url}/v1/completions", slots, on_record)
        for request, body in zip(requests, bodies, strict=True):
            await asyncio.sleep(request.arrival_time - exchange.now())
            is_held_back = slots.locked()
            await slots.acquire()
            if is_held_back:
                held_until = exchange.now()
            due_time = max(request.arrival_time, held_until)
            tasks.append(group.create_task(exchange.send(request, body, due_time)))
    return [task.result() for task in tasks]


class _Exchange:
    """One run against one server: the clock, the connection pool and who hears of results."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        slots: asyncio.Semaphore,
        on_record: Callable[[RequestRecord], None] | None,
    ) -> None:
        self._session = session
        self._url = url
        self._slots = slots
        self._on_record = on_record
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return self._loop.time() - self._start

    async def send(self, request: WorkloadRequest, body: bytes, due_time: float) -> RequestRecord:
        """Send one request and follow its stream to the end; the slot it holds is released."""
        sent_time = self.now()
        answer = _Answer()
        try:
            await self._follow(body, answer)
        except TimeoutError:
            answer.fail("no end within the time limit")
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            answer.fail(f"{type(error).__name__}: {error}")
        finally:
            self._slots.release()
        record = RequestRecord(
            request=request,
            due_time=due_time,
            sent_time=sent_time,
            token_times=tuple(answer.token_times),
            finish_time=self.now(),
            usage=answer.usage,
            error=answer.verdict(),
        )
        if self._on_record is not None:
            self._on_record(record)
        return record

    async def _follow(self, body: bytes, answer: "_Answer") -> None:
        async with self._session.post(self._url, data=io.BytesIO(body)) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                answer.fail(f"HTTP {response.status}: {text}")
                return
            decoder = EventDecoder()
            async for received in response.content.iter_any():
                for event in decoder.feed(received):
                    answer.take(event, self.now())
                if answer.is_over:
                    return


class _WireChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _WireUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _WireError(msgspec.Struct):
    message: str = "no message"


class _WireEvent(msgspec.Struct):
    choices: list[_WireChoice] = []
    usage: _WireUsage | None = None
    error: _WireError | str | None = None


@dataclass(slots=True)
class _Answer:
    """A streamed answer so far."""

    token_times: list[float] = field(default_factory=list)
    usage: Usage | None = None
    error: str | None = None
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_done or self.error is not None

    def fail(self, reason: str) -> None:
        if not self.is_over:
            self.error = reason[:MAX_ERROR_CHARACTERS]

    def take(self, event: str, now: float) -> None:
        """Account for the data of one event that arrived `now`."""
        if event == "[DONE]":
            self.is_done = True
            return
        chunk = msgspec.json.decode(event, type=_WireEvent)
        if chunk.error is not None:
            reason = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            self.fail(f"error in the stream: {reason}")
        if chunk.usage is not None:
            self.usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        if any(self._has_output(choice) for choice in chunk.choices):
            self.token_times.append(now)

    def verdict(self) -> str | None:
        """Return what went wrong, None if nothing did."""
        if self.error is not None:
            return self.error
        if not self.is_done:
            return "the stream ended before [DONE]"
        return None if self.token_times else "the answer has no tokens"

    def _has_output(self, choice: _WireChoice) -> bool:
        """An empty text may be half a character; only a bare farewell after output carries no token."""
        return choice.text != "" or choice.finish_reason is None or not self.token_times


def _encode(target: Target, request: WorkloadRequest) -> bytes:
    body = {
        "model": target.model,
        "prompt": request.prompt_token_ids(target.vocab_size),
        "max_tokens": request.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.shape.user:
        body["user"] = request.shape.user
    return msgspec.json.encode(body)
