"""A router over engines that the test answers for: no request is lost with an engine, and no token twice."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import ClusterError, EngineStoppedError, RequestFailedError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import Continuation, FinishReason, NewRequest, RequestId, SamplingParams
from loong.engine.client import Answered, EngineLimits, PutToken, RequestLoad
from loong.server.engines.router import LOSSES_CODE, MAX_LOSSES, EngineRouter

LIMITS = EngineLimits(1000, 1000, 100)
LONG = tuple(range(100))


@dataclass
class Engine:
    """An engine client whose answers the test makes."""

    limits: EngineLimits = LIMITS
    requests: dict[RequestId, tuple[NewRequest, PutToken]] = field(default_factory=dict)
    aborted: list[RequestId] = field(default_factory=list)
    parents: dict[RequestId, str] = field(default_factory=dict)

    def submit(self, request: NewRequest, put: PutToken) -> None:
        self.requests.update(dict.fromkeys(request.choice_ids, (request, put)))

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append(request_id)

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        self.parents[request_id] = traceparent

    @asynccontextmanager
    async def admit(self, load: RequestLoad) -> AsyncIterator[None]:
        yield

    def request(self, request_id: RequestId) -> NewRequest:
        return self.requests[request_id][0]

    def put(self, request_id: RequestId, answered: Answered) -> None:
        self.requests[request_id][1](answered)

    def produce(self, request_id: RequestId, *token_ids: int) -> None:
        for token_id in token_ids:
            self.put(request_id, ProducedToken(request_id, token_id))

    def die(self) -> None:
        """Fail all choices, as a channel does that has closed."""
        for request_id in tuple(self.requests):
            self.put(request_id, EngineStoppedError())


@dataclass
class Office:
    """Two engines, and what a client got."""

    engines: list[Engine]
    router: EngineRouter
    now: float = 0.0
    got: list[Answered] = field(default_factory=list)

    def submit(self, request_id: RequestId, prompt: tuple[int, ...] = LONG, **fields: object) -> NewRequest:
        request = NewRequest(request_id, prompt, SamplingParams(max_tokens=9), **fields)  # type: ignore[arg-type]
        self.router.submit(request, self.got.append)
        return request

    def holder(self, request_id: RequestId) -> Engine:
        """The engine that has got a request last."""
        (found,) = [engine for engine in self.engines if request_id in engine.requests]
        return found


def office(num_engines: int = 2) -> Office:
    made = Office([Engine() for _ in range(num_engines)], EngineRouter(LIMITS, 10_000, lambda: made.now))
    for engine_id, engine in enumerate(made.engines):
        made.router.join(engine_id, engine)
    return made


def test_a_conversation_stays_at_its_engine_and_another_goes_elsewhere() -> None:
    made = office()
    made.submit("a")
    first = made.holder("a")
    made.submit("b", tuple(range(100, 200)))
    assert made.holder("b") is not first, "the first has work"
    for engine, name in ((first, "a"), (made.holder("b"), "b")):
        engine.put(name, ProducedToken(name, 7, FinishReason.STOP))
    made.submit("a2", (*LONG, 7, *range(200, 250)))
    assert made.holder("a2") is first
    made.submit("salted", LONG, cache_salt="other")
    assert made.holder("salted") is not first, "it can read nothing there, and the first has work"
    assert made.router.stats.num_cached_tokens == 96


def test_work_is_counted_until_a_request_ends() -> None:
    made = office(1)
    made.submit("a", num_choices=2)
    assert made.router.outstanding() == {0: 100 + 2 * 9}
    made.engines[0].produce("a", 1)
    assert made.router.outstanding() == {0: 2 * 9}
    made.router.abort("a")
    made.router.abort("a-1")
    assert made.router.outstanding() == {0: 0}
    assert made.engines[0].aborted == ["a", "a-1"]


def test_a_request_of_an_engine_that_dies_goes_on_after_its_last_token() -> None:
    made = office()
    request = made.submit("a")
    first = made.holder("a")
    made.now = 2.0
    first.put("a", CachedTokens("a", 5))
    first.produce("a", 4, 5)
    made.now = 5.0
    first.die()
    (second,) = [engine for engine in made.engines if engine is not first]
    assert second.request("a") == replace(request, continues=Continuation((4, 5), 3.0))
    assert set(made.router.outstanding().values()) == {102 + 9}
    first.produce("a", 9)  # too late
    second.put("a", CachedTokens("a", 6))
    second.produce("a", 6)
    assert set(made.router.outstanding().values()) == {9}, "its known tokens are computed"
    second.put("a", ProducedToken("a", 7, FinishReason.STOP))
    assert made.got == [
        CachedTokens("a", 5),
        ProducedToken("a", 4),
        ProducedToken("a", 5),
        ProducedToken("a", 6),
        ProducedToken("a", 7, FinishReason.STOP),
    ]
    assert (made.router.stats.num_taken_over, made.router.stats.num_losses) == (1, 1)


def test_choices_go_on_one_by_one_unless_none_has_a_token() -> None:
    made = office(3)
    request = made.submit("a", num_choices=3, num_prompt_logprobs=0)
    first = made.holder("a")
    first.die()
    second = next(engine for engine in made.engines if engine is not first and engine.requests)
    assert second.request("a") == request
    scored = PromptLogprobs("a", range(1, 2), [-1.0], [1], [], [])
    second.put("a", scored)
    second.produce("a-1", 4)
    second.put("a-2", ProducedToken("a-2", 3, FinishReason.STOP))
    second.die()
    (third,) = [engine for engine in made.engines if engine not in (first, second)]
    choices = [replace(choice, num_prompt_logprobs=None) for choice in request.choices()]
    assert third.requests.keys() == {"a", "a-1"}
    assert third.request("a") == choices[0]
    assert third.request("a-1") == replace(choices[1], continues=Continuation((4,), 0.0))
    made.router.abort("a")
    third.put("a-1", ProducedToken("a-1", 8, FinishReason.STOP))
    assert third.aborted == ["a"]
    assert made.got == [
        scored,
        ProducedToken("a-1", 4),
        ProducedToken("a-2", 3, FinishReason.STOP),
        ProducedToken("a-1", 8, FinishReason.STOP),
    ]


def test_requests_wait_for_an_engine_while_there_is_none() -> None:
    made = office(1)
    made.router.note("a", "00-1-2-01")
    made.submit("a")
    made.submit("b")
    made.engines[0].die()
    made.submit("c")
    made.router.abort("b")
    assert made.router.outstanding() == {}
    assert made.router.stats.num_waiting == 2
    late = Engine(replace(LIMITS, max_request_kv=70))
    made.router.join(0, late)
    assert late.requests.keys() == {"a", "c"}
    assert late.parents == {"a": "00-1-2-01"}
    assert made.router.limits.max_request_kv == 70
    made.router.lose(0)
    made.router.stop()
    made.submit("d")
    assert [type(answer) for answer in made.got] == [EngineStoppedError] * 3


def test_a_request_that_ends_engine_after_engine_fails_by_name() -> None:
    made = office(MAX_LOSSES + 2)
    made.submit("a")
    for _ in range(MAX_LOSSES - 1):
        holder = made.holder("a")
        holder.die()
        holder.requests.clear()
    made.holder("a").produce("a", 3)  # which ends the row
    for number in range(MAX_LOSSES):
        assert len(made.got) == 1, number
        engine = Engine()
        made.router.join(10 + number, engine)
        made.engines.append(engine)
        holder = made.holder("a")
        holder.die()
        holder.requests.clear()
    error = made.got[-1]
    assert isinstance(error, RequestFailedError)
    assert error.code == LOSSES_CODE


@pytest.mark.parametrize("error", [ClusterError("no grammar"), RequestFailedError("no room", "no_room")])
def test_other_errors_end_all_choices_once(error: ClusterError) -> None:
    made = office()
    made.submit("a", num_choices=2)
    made.holder("a").put("a", error)
    made.holder("a").produce("a-1", 3)
    assert made.got == [error]
    assert set(made.router.outstanding().values()) == {0}
