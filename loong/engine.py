"""Real workers served by the loop, and every request's tokens to whoever asked for them."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace

from loong.core.errors import ClusterError, LoongError
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot
from loong.core.timeline import ClusterHistory, Timeline
from loong.executor.workers import WorkersExecutor
from loong.scheduling import Scheduling
from loong.server.engine_client import EngineLimits, Health
from loong.stream import Stream

logger = logging.getLogger(__name__)

HEALTHY_SILENCE_SECONDS = 4.0  # of heartbeats that are a second apart
HEALTHY_STEP_SECONDS = 120.0  # more than the longest chunk or step takes


class Engine:
    """An `EngineClient` on real workers. Arrivals and aborts go through the executor's stream of events."""

    def __init__(
        self, scheduling: Scheduling, executor: WorkersExecutor, limits: EngineLimits, timeline: Timeline
    ) -> None:
        self.limits = limits
        self._scheduling, self._executor, self._timeline = scheduling, executor, timeline
        self._streams: dict[RequestId, Stream[ProducedToken | None]] = {}
        self._failure: str | None = None
        self._advanced_at = executor.now  # when something was last done, or there last was something to do

    async def run(self) -> None:
        """Serve until drained. Raises `ClusterError` when an instance is lost; all streams end with it."""
        try:
            async for event in self._scheduling.events():
                self._deliver(event)
        finally:
            self._failure = _reason(sys.exception())
            for stream in self._streams.values():
                stream.put(None)

    async def generate(self, request: Request) -> AsyncGenerator[ProducedToken, None]:
        """Tokens of all choices of a request as they are produced; the last of each has a finish reason.

        Closing the generator early aborts the request. Raises `ClusterError` if the engine fails.
        """
        if self._failure is not None:
            raise ClusterError(self._failure)
        if (json_schema := request.sampling_params.json_schema) is not None:
            self._executor.prepare_grammar(json_schema)
        request_ids = [choice.request_id for choice in request.choices()]
        stream: Stream[ProducedToken | None] = Stream()
        if not self._streams:
            self._advanced_at = self._executor.now
        self._streams.update(dict.fromkeys(request_ids, stream))
        self._executor.post(RequestArrived(self._executor.now, self._stamped(request)))
        try:
            while any(request_id in self._streams for request_id in request_ids):
                token = await stream.get()
                if token is None:
                    raise ClusterError(self._failure)
                if token.request_id not in self._streams:
                    continue  # it was told before the choice was aborted
                if token.finish_reason is not None:
                    del self._streams[token.request_id]
                yield token
        finally:
            for request_id in request_ids:
                self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        """End one choice of a request, unless it has ended; for whoever reads its tokens, between two."""
        if self._streams.pop(request_id, None) is not None and self._failure is None:
            self._executor.post(RequestAborted(self._executor.now, request_id))

    @property
    def num_open(self) -> int:
        """Requests whose tokens someone waits for."""
        return len(self._streams)

    async def wait_until_idle(self) -> None:
        """Wait until nobody waits for tokens."""
        while self._streams:  # noqa: ASYNC110 - only at the end of a server's life
            await asyncio.sleep(0.02)

    def health(self) -> Health:
        """Whether the loop runs, every worker was heard from lately, and what is asked advances."""
        silence = self._executor.seconds_since_heard
        standstill = self._executor.now - self._advanced_at if self._streams else 0.0
        if self._failure is not None:
            return Health(is_alive=False, message=self._failure)
        if silence > HEALTHY_SILENCE_SECONDS:
            return Health(is_alive=False, message=f"a worker has been silent for {silence:.1f} s")
        if standstill > HEALTHY_STEP_SECONDS:
            message = f"no step has ended for {standstill:.0f} s, and {self.num_open} requests wait"
            return Health(is_alive=False, message=message)
        return Health(is_alive=True, message="ok")

    def snapshot(self) -> Snapshot:
        """The cluster now, with the counts since the start; once the engine has failed, nothing is there."""
        snapshot = self._scheduling.state.snapshot(self._executor.now)
        return snapshot if self._failure is None else _emptied(snapshot)

    def history(self) -> ClusterHistory:
        """The last batches and migrations, oldest first."""
        return self._timeline.history()

    def _stamped(self, request: Request) -> Request:
        prompt = tuple(request.prompt_token_ids)  # what travels to workers
        return replace(request, arrival_time=self._executor.now, prompt_token_ids=prompt)

    def _deliver(self, event: Event) -> None:
        match event:
            case TokensProduced():
                self._advanced_at = event.time
                for token in event.tokens:
                    if (stream := self._streams.get(token.request_id)) is not None:
                        stream.put(token)
            case BatchFinished() | MigrationFinished():
                self._advanced_at = event.time
            case InstanceLost():
                raise ClusterError(f"instance {event.instance_id} was lost: {event.reason}")
            case _:
                pass


def _reason(error: BaseException | None) -> str:
    """Why an engine has stopped, for clients and operators."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return "the engine has stopped"
    return str(error) if isinstance(error, LoongError) else f"{type(error).__name__}: {error}"


def _emptied(snapshot: Snapshot) -> Snapshot:
    """The same counts, but nothing that waits, runs or is held."""
    instances = tuple(instance.using(0).running(None) for instance in snapshot.instances)
    return replace(snapshot, instances=instances, waiting=(), running=(), batches=(), migrations=())
