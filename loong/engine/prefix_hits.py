"""Counts of the tokens that requests read from the prefix cache."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loong.core.applied import Applied
from loong.core.cached_tokens import CachedTokens
from loong.core.events import Event, RequestAborted, RequestArrived
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.plan import IterationPlan
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Counts since the start.

    `num_asked` are the prompt tokens of requests that began and may read cached KV, and `num_hits` those of
    them that were cached. `read_by_instance` are cached tokens by the instance that has them, also those
    that a request reads when it begins again.
    """

    num_asked: int = 0
    num_hits: int = 0
    read_by_instance: Mapping[InstanceId, int] = field(default_factory=dict)


class PrefixHits(Observer):
    """Counts what requests read as they begin. `take` receives each request's number, unless it is 0.

    A request that begins again reads mostly its own KV, which is no hit.
    """

    def __init__(self, take: Callable[[CachedTokens], None]) -> None:
        self._take = take
        self._num_asked = self._num_hits = 0
        self._read: Counter[InstanceId] = Counter()
        self._waiting: dict[RequestId, Request] = {}  # choices that have not begun

    @property
    def counts(self) -> PrefixCounts:
        """The counts so far."""
        return PrefixCounts(self._num_asked, self._num_hits, dict(self._read))

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Note requests that arrive, and that end before they begin."""
        match event:
            case RequestArrived():
                self._waiting.update(dict.fromkeys(event.request.choice_ids, event.request))
            case RequestAborted():
                self._waiting.pop(event.request_id, None)
            case _:
                pass

    def on_plan(
        self,
        _events: Sequence[Event],
        _snapshot: Snapshot,
        plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Count what the requests read that begin with a plan."""
        num_read: dict[RequestId, int] = {}
        for borrowing in plan.effective_borrowings:
            tokens = tokens_by_instance(borrowing.segments)
            num_read[borrowing.request_id] = tokens.total()
            self._read.update(tokens)
        if not self._waiting:
            return
        for failure in plan.failures:
            self._waiting.pop(failure.request_id, None)
        for batch in plan.batches:
            for request_id in self._waiting.keys() & batch.request_ids:
                self._begin(self._waiting[request_id], CachedTokens(request_id, num_read.get(request_id, 0)))

    def _begin(self, request: Request, cached: CachedTokens) -> None:
        for choice_id in request.choice_ids:
            self._waiting.pop(choice_id, None)
        if request.uses_cache and request.num_prompt_logprobs is None:
            self._num_asked += len(request.prompt_token_ids)
            self._num_hits += cached.num_tokens
        if cached.num_tokens:
            self._take(cached)
