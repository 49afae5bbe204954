"""The loop on real workers, which passes each request's tokens to its client."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from loong.core.applied import Applied
from loong.core.cached_tokens import CachedTokens
from loong.core.cluster_history import ClusterHistory
from loong.core.errors import (
    ClusterError,
    EngineStoppedError,
    InvalidRequestError,
    LoongError,
    RequestFailedError,
)
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceLost,
    MigrationFinished,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, Request, RequestId
from loong.core.snapshot import Snapshot
from loong.engine.client import EngineLimits, PutToken
from loong.engine.cluster_size import ClusterSize, size_of
from loong.engine.health import Health, dead, health_of
from loong.engine.held_tokens import HeldTokens
from loong.engine.largest_prefixes import CachedPrefix, LargestPrefixes
from loong.engine.loop import Scheduling
from loong.engine.prefix_hits import PrefixCounts, PrefixHits
from loong.engine.scaling import Scaling
from loong.executor.workers import WorkersExecutor
from loong.messages.wire import encode
from loong.observability.timeline import Timeline

logger = logging.getLogger(__name__)

FIXED = "the number of instances is fixed on GPUs: their fabrics keep the memory of all peers mapped"
HEALTHY_STEP_SECONDS = 120.0  # more than the longest chunk or step takes


class Engine:
    """The engine of a server, on real workers. Arrivals and aborts pass through the executor's events."""

    def __init__(
        self,
        scheduling: Scheduling,
        executor: WorkersExecutor,
        limits: EngineLimits,
        timeline: Timeline,
        scaling: Scaling | None = None,
    ) -> None:
        """Set up. Without `scaling`, the number of instances is fixed."""
        self._limits, self._scaling = limits, scaling
        self._scheduling, self._executor, self._timeline = scheduling, executor, timeline
        self._waiting: dict[RequestId, PutToken] = {}  # choices that have not ended
        self._scored: dict[RequestId, HeldTokens] = {}  # choices whose prompt logprobs are incomplete
        self._unprepared: set[RequestId] = set()  # choices whose grammar is being compiled
        self._failure: str | None = None
        self._advanced_at = executor.now  # time of the last progress, or of the first waiting request
        executor.take_prompt_logprobs = self._take_prompt_logprobs
        self._hits = PrefixHits(self._take_cached_tokens) if scheduling.state.keeps_prefixes else None
        self._largest = LargestPrefixes(scheduling.state.owners)
        scheduling.observe(self)
        if self._hits is not None:
            scheduling.observe(self._hits)
        if scaling is not None:
            scheduling.observe(scaling)

    def size(self) -> ClusterSize:
        """Return the instances, the number that is asked for, and the most that there can be."""
        snapshot = self.snapshot()
        if self._scaling is not None:
            return self._scaling.size(snapshot)
        num_instances = len(snapshot.pools)
        return size_of(snapshot, snapshot.pools.keys(), 0, num_instances, num_instances)

    def scale(self, num_instances: int, num_memory: int | None = None) -> None:
        """Begin to change the number of instances, and of memory instances (None: as before).

        Raises `InvalidRequestError` if that is impossible, and `RequestTooLargeError` if a live request would
        never fit.
        """
        if self._scaling is None:
            raise InvalidRequestError(FIXED, param="num_instances")
        self._scaling.scale(num_instances, self.snapshot(), num_memory)

    async def wait_for_size(self) -> None:
        """Wait until the instances that are asked for serve. Raises `EngineStoppedError` if none will."""
        if self._scaling is not None:
            await self._scaling.wait()

    @property
    def limits(self) -> EngineLimits:
        """The bounds of a request, which change with the number of instances."""
        if self._scaling is None or self._scaling.max_request_kv == self._limits.max_request_kv:
            return self._limits
        self._limits = replace(self._limits, max_request_kv=self._scaling.max_request_kv)
        return self._limits

    async def run(self) -> None:
        """Serve until drained.

        Raises `ClusterError` when an instance is lost that is not started again; all streams end with it.
        """
        try:
            async for _ in self._scheduling.events():
                pass
        finally:
            self._failure = _reason(sys.exception())
            for put in (*self._waiting.values(), *(scored.put for scored in self._scored.values())):
                put(EngineStoppedError())
            if self._scaling is not None:
                self._scaling.stop()

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a request, and pass the tokens of all its choices to `put`, or the error that ends them."""
        if self._failure is not None:
            put(EngineStoppedError())
            return
        choice_ids, params = request.choice_ids, request.sampling_params
        try:
            encode(params)
            prepared = (
                None if params.grammar is None else self._executor.calls.prepare_grammar(params.grammar)
            )
        except (OverflowError, TypeError, ValueError):  # from values that msgpack cannot encode
            logger.exception("request %s cannot be sent to workers", request.request_id)
            put(ClusterError("the request cannot be sent to workers; the server's log says why"))
            return
        arrived = request.arriving(self._executor.now)
        if not self._waiting:
            self._advanced_at = arrived.arrival_time
        if request.num_prompt_logprobs is not None and len(request.prompt_token_ids) > 1:
            num_top = min(request.num_prompt_logprobs, self.limits.vocab_size)
            scored = HeldTokens(request, num_top, put)
            self._scored.update(dict.fromkeys(choice_ids, scored))
            put = scored.put
        self._waiting.update(dict.fromkeys(choice_ids, put))
        if prepared is None:
            self._arrive(arrived)
            return
        self._unprepared.update(choice_ids)
        prepared.add_done_callback(lambda _: self._end_preparation(arrived, choice_ids, prepared.exception()))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one choice of a request unless it has ended. Its tokens stop."""
        self._scored.pop(request_id, None)
        if self._waiting.pop(request_id, None) is not None:
            self._abort_arrived(request_id, reason)

    def health(self) -> Health:
        """Return whether the loop runs, which instances serve, and whether waiting requests make progress."""
        standstill = self._executor.now - self._advanced_at if self._waiting else 0.0
        if self._failure is not None:
            return dead(self._failure)
        if standstill > HEALTHY_STEP_SECONDS:
            return dead(f"no step has ended for {standstill:.0f} s, and {len(self._waiting)} requests wait")
        executor = self._executor
        return health_of(self.snapshot(), executor.silences, executor.quarantined, executor.trouble)

    def snapshot(self) -> Snapshot:
        """Return the present snapshot with the counts since the start.

        After a failure only the counts remain.
        """
        snapshot = self._scheduling.state.snapshot(self._executor.now)
        return snapshot if self._failure is None else snapshot.emptied()

    @property
    def prefix_counts(self) -> PrefixCounts | None:
        """The counts of the prefix cache, or None without one."""
        return None if self._hits is None else self._hits.counts

    @property
    def largest_prefixes(self) -> tuple[CachedPrefix, ...]:
        """The largest parts of the prefix cache, as they are or were not long before."""
        return self._largest.at(self._executor.now)

    def reset_prefix_cache(self) -> None:
        """Evict all KV that no request reads, before requests that are submitted from now on arrive."""
        if self._failure is None:
            self._executor.post(PrefixCacheReset(self._executor.now))

    @property
    def num_stray_frames(self) -> int:
        """The number of dropped frames on private sockets that were not messages."""
        return self._executor.num_stray_frames

    def history(self) -> ClusterHistory:
        """Return the last batches and migrations, oldest first."""
        return self._timeline.history()

    def _arrive(self, request: Request) -> None:
        self._executor.post(RequestArrived(self._executor.now, request))

    def _abort_arrived(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._failure is None and request_id not in self._unprepared:
            self._executor.post(RequestAborted(self._executor.now, request_id, reason))

    def _end_preparation(
        self, request: Request, choice_ids: Sequence[RequestId], error: BaseException | None
    ) -> None:
        """Let a request arrive after all workers have compiled its grammar, unless all its choices were
        aborted.
        """
        self._unprepared.difference_update(choice_ids)
        puts = [self._waiting[choice_id] for choice_id in choice_ids if choice_id in self._waiting]
        if self._failure is not None or not puts:
            return
        if error is not None:
            for choice_id in choice_ids:
                self._scored.pop(choice_id, None)
                self._waiting.pop(choice_id, None)
            puts[0](ClusterError(str(error)))
            return
        self._arrive(request)
        for choice_id in choice_ids:
            if choice_id not in self._waiting:
                self._abort_arrived(choice_id)

    def _take_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Take an instance's log probabilities of a prompt. The request may be gone already."""
        scored = self._scored.get(part.request_id)
        if scored is not None and scored.take(part):
            self._scored = {i: other for i, other in self._scored.items() if other is not scored}

    def _take_cached_tokens(self, cached: CachedTokens) -> None:
        if (put := self._waiting.get(cached.request_id)) is not None:
            put(cached)

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Pass on tokens. Raises `ClusterError` when an instance is lost for good."""
        match event:
            case TokensProduced():
                self._advanced_at = event.time
                for token in event.tokens:
                    if (put := self._waiting.get(token.request_id)) is not None:
                        if token.finish_reason is not None:
                            del self._waiting[token.request_id]
                        put(token)
            case BatchFinished() | MigrationFinished():
                self._advanced_at = event.time
            case InstanceLost() if not event.returns:
                raise ClusterError(f"instance {event.instance_id} was lost: {event.reason}")
            case _:
                pass

    def on_plan(
        self,
        _events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Pass on the errors of failed requests.

        One that is too large for the limit and has not begun was checked before the limit fell, and is itself
        at fault. The limit falls after the plan that fails requests which were there before.
        """
        for failure in plan.failures:
            view = snapshot.request[failure.request_id]
            is_too_large = not view.has_begun and view.num_final_tokens > self.limits.max_request_kv
            self._scored.pop(failure.request_id, None)
            if (put := self._waiting.pop(failure.request_id, None)) is not None:
                failed = RequestFailedError(failure.reason, failure.cause.value)
                put(InvalidRequestError(failure.reason) if is_too_large else failed)


def _reason(error: BaseException | None) -> str:
    """Return the reason why the engine stopped, for clients and operators."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return "the engine has stopped"
    return str(error) if isinstance(error, LoongError) else f"{type(error).__name__}: {error}"
