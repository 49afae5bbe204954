"""An engine made of several: each request goes to one of them, and to another if that one is lost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import EngineStoppedError, RequestFailedError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, RequestId, TokenId
from loong.engine.client import Answered, EngineClient, EngineLimits, PutToken
from loong.server.engines.open_request import OpenRequest
from loong.server.engines.serving_engines import ServingEngines

MAX_LOSSES = 3  # engines lost in a row under a request without a new token of it; then the request fails
LOSSES_CODE = "repeated_engine_loss"


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Counts since the start, and the requests that wait for any engine now.

    `num_cached_tokens` are those that a choice of an engine counted on.
    """

    num_routed: Counter[int]  # requests, by engine
    num_cached_tokens: int
    num_taken_over: int
    num_losses: int
    num_joins: int
    num_waiting: int


class EngineRouter:
    """Implements `TokenEngine` over several engines, which join and are lost.

    A request that has lost its engine goes on at another, which computes its known tokens again. `limits` are
    those until an engine joins. Of each engine as much is remembered as fits into `max_remembered` tokens.
    `report_limit` is called when the limits may have changed.
    """

    def __init__(
        self, limits: EngineLimits, max_remembered: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self.report_limit: Callable[[], None] = lambda: None
        self._clock = clock
        self._engines = ServingEngines(limits, max_remembered)
        self._open: dict[RequestId, OpenRequest] = {}  # by choice
        self._parents: dict[RequestId, str] = {}  # of requests that follow
        self._waiting: dict[OpenRequest, None] = {}  # for any engine, in order
        self._has_stopped = False
        self._num_routed: Counter[int] = Counter()
        self._num_cached = self._num_taken_over = self._num_losses = self._num_joins = 0

    @property
    def limits(self) -> EngineLimits:
        """The bounds of a request: those of the engine with the most room."""
        return self._engines.limits

    @property
    def stats(self) -> RouterStats:
        """The counts since the start."""
        return RouterStats(
            self._num_routed.copy(),
            self._num_cached,
            self._num_taken_over,
            self._num_losses,
            self._num_joins,
            len(self._waiting),
        )

    def outstanding(self) -> dict[int, int]:
        """Return the work of open requests of each engine that serves, in tokens."""
        return self._engines.outstanding()

    def join(self, engine_id: int, client: EngineClient) -> None:
        """Give requests to an engine from now on, first those that wait."""
        self._engines.add(engine_id, client)
        self._num_joins += 1
        self.report_limit()
        waiting, self._waiting = self._waiting, {}
        for opened in waiting:
            self._route(opened)

    def lose(self, engine_id: int) -> None:
        """Give an engine no more requests. Its client reports to those that it has."""
        if self._engines.remove(engine_id):
            self._num_losses += 1
            self.report_limit()

    def stop(self) -> None:
        """End all requests, because no engine will join any more."""
        self._has_stopped = True
        for opened in dict.fromkeys(self._open.values()):
            self._end(opened, EngineStoppedError())

    def forget_prefixes(self) -> None:
        """Forget what engines have cached, because they drop it."""
        self._engines.forget_prefixes()

    def note(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of the span of a request that follows."""
        self._parents[request_id] = traceparent

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a request at one of the engines."""
        parents = {i: self._parents.pop(i) for i in request.choice_ids if i in self._parents}
        if self._has_stopped:
            put(EngineStoppedError())
            return
        outputs: dict[RequestId, list[TokenId]] = {choice_id: [] for choice_id in request.choice_ids}
        opened = OpenRequest(request, put, outputs, self._engines.blocks_of(request), parents)
        self._open.update(dict.fromkeys(outputs, opened))
        self._route(opened)

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one choice of a request unless it has ended."""
        if (opened := self._open.get(request_id)) is None:
            return
        client = self._engines.client_of(opened)
        self._end_choice(opened, request_id)
        if client is not None:
            client.abort(request_id, reason)

    def _route(self, opened: OpenRequest) -> None:
        """Give a request to the engine with the least work before it, or let it wait for one."""
        opened.attempt += 1
        if not self._engines:
            opened.engine_id = None
            self._waiting[opened] = None
            return
        load = self._engines.place(opened)
        self._num_routed[load.engine_id] += 1
        self._num_cached += load.num_cached
        client = self._engines.client_of(opened)
        assert client is not None, "it was placed"
        for request_id, traceparent in opened.parents.items():
            client.note_parent(request_id, traceparent)
        client.submit(opened.continued(self._clock()), partial(self._take, opened, opened.attempt))

    def _take(self, opened: OpenRequest, attempt: int, answered: Answered) -> None:
        """Pass an answer of an engine on, unless the request is at another by now."""
        if attempt != opened.attempt:
            return
        match answered:
            case ProducedToken():
                self._take_token(opened, answered)
            case PromptLogprobs():
                opened.request = replace(opened.request, num_prompt_logprobs=None)  # they are reported once
                opened.put(answered)
            case CachedTokens():
                if not opened.has_counted_cached:
                    opened.has_counted_cached = True
                    opened.put(answered)
            case EngineStoppedError():
                self._take_over(opened)
            case error:
                self._end(opened, error)

    def _take_token(self, opened: OpenRequest, token: ProducedToken) -> None:
        if (output := opened.outputs.get(token.request_id)) is None:
            return  # it was aborted
        if opened.is_prompt_counted:
            self._engines.count_first_token(opened)
        if opened.first_token_at is None:
            opened.first_token_at = self._clock()
        output.append(token.token_id)
        if token.finish_reason is not None:
            self._end_choice(opened, token.request_id)
        opened.put(token)

    def _take_over(self, opened: OpenRequest) -> None:
        """Let a request whose engine is lost go on at another."""
        assert opened.engine_id is not None, "an engine answered it"
        self.lose(opened.engine_id)
        opened.attempt += 1  # late answers are void
        opened.count_loss()
        if opened.num_losses >= MAX_LOSSES:
            what = f"{opened.num_losses} engines were lost while they computed request "
            self._end(opened, RequestFailedError(what + opened.request.request_id, LOSSES_CODE))
            return
        for part in opened.parts():
            self._num_taken_over += 1
            self._open.update(dict.fromkeys(part.outputs, part))
            self._route(part)

    def _end_choice(self, opened: OpenRequest, choice_id: RequestId) -> None:
        self._engines.remember(opened, choice_id)
        del opened.outputs[choice_id], self._open[choice_id]
        if not opened.outputs:
            self._engines.count(opened, 0)
            self._waiting.pop(opened, None)

    def _end(self, opened: OpenRequest, error: Answered) -> None:
        """End all choices of a request with an error."""
        opened.attempt += 1
        for choice_id in opened.outputs:
            self._open.pop(choice_id, None)
        self._engines.count(opened, 0)
        self._waiting.pop(opened, None)
        opened.put(error)
