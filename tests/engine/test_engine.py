"""The engine as its server sees it, over workers that do nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self, cast

import pytest
from plans import plannable, prefill
from raw_http import until

from loong.core.cost.cost_model import CostModel
from loong.core.errors import ClusterError, EngineStoppedError, InvalidRequestError
from loong.core.events import (
    BatchFinished,
    Drained,
    Event,
    InstanceJoined,
    InstanceLost,
    ProducedToken,
    TokensProduced,
)
from loong.core.grammar import Grammar, GrammarKind
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction
from loong.core.plan import Failure, IterationPlan, Transfer
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, SamplingParams
from loong.core.snapshot import Snapshot
from loong.engine.client import EngineLimits
from loong.engine.engine import HEALTHY_STEP_SECONDS, Engine
from loong.engine.health import HEALTHY_SILENCE_SECONDS, Health, HealthState, Trouble
from loong.engine.loop import Scheduling
from loong.executor.workers import WorkersExecutor
from loong.messages.stream import Stream
from loong.observability.timeline import Timeline
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import Policy
from loong.server.openai.token_stream import TokenStream
from loong.state.cluster_state import ClusterState

INSTANCES = (ElasticInstance(0, 1, InstanceKind.FULL, 100),)
REQUEST = NewRequest("a", (1, 2, 3), SamplingParams(max_tokens=5))


@dataclass
class IdleWorkers:
    """Workers that are heard from, but take no step; the test moves their clock."""

    now: float = 0.0
    silences: dict[int, float] = field(default_factory=dict)
    quarantined: frozenset[int] = frozenset()
    trouble: str = ""
    events: Stream[Event | Drained] = field(default_factory=Stream)
    grammars: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    take_prompt_logprobs: Callable[[PromptLogprobs], None] = field(default=lambda _: None)

    async def next_events(self) -> Sequence[Event]:
        return [event for event in await self.events.get_all() if not isinstance(event, Drained)]

    def post(self, event: Event | Drained) -> None:
        self.events.put(event)

    def submit(self, instructions: Iterable[Instruction]) -> None:
        pass

    @property
    def calls(self) -> Self:
        return self

    def prepare_grammar(self, grammar: Grammar) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.grammars[grammar.text] = done
        return done


def no_plan(_snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    return IterationPlan()


def fail_all(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    return IterationPlan(failures=tuple(Failure(view.request_id, "no room") for view in snapshot.waiting))


def prefill_all(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    views = plannable(snapshot)
    return IterationPlan((prefill(views, (0,), transfer=Transfer.QUERY),) if views else ())


@asynccontextmanager
async def running_engine(workers: IdleWorkers, policy: Policy = no_plan) -> AsyncIterator[Engine]:
    executor = cast("WorkersExecutor", workers)
    scheduling = Scheduling(ClusterState(INSTANCES), policy, WorkCostModel(), executor)
    engine = Engine(scheduling, executor, EngineLimits(100, 100, 10), Timeline())
    running = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        workers.post(Drained())
        await asyncio.gather(running, return_exceptions=True)


def with_schema(request_id: str, num_choices: int = 1) -> NewRequest:
    """Return a request whose grammar is named by its id."""
    params = SamplingParams(max_tokens=5, grammar=Grammar(GrammarKind.REGEX, request_id))
    return NewRequest(request_id, (1, 2, 3), params, num_choices=num_choices)


async def first_token(engine: Engine, request: NewRequest = REQUEST) -> ProducedToken:
    with TokenStream(engine, request) as tokens:
        return await anext(tokens)


async def until_waiting(engine: Engine, number: int) -> None:
    await until(lambda: len(engine.snapshot().waiting) == number)


async def test_an_engine_with_nothing_to_do_is_healthy_for_ever() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        workers.now = 1e6
        assert engine.health().is_alive


async def test_requests_that_do_not_advance_make_an_engine_unhealthy() -> None:
    workers = IdleWorkers(now=1e6)
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.now += HEALTHY_STEP_SECONDS
        assert engine.health().is_alive
        workers.now += 1
        health = engine.health()
        assert not health.is_alive
        assert all(word in health.message for word in ("121 s", "1 request"))
        asking.cancel()
        await until_waiting(engine, 0)
        assert engine.health().is_alive


async def test_a_worker_that_is_not_heard_from_makes_an_engine_unhealthy() -> None:
    workers = IdleWorkers(silences={0: HEALTHY_SILENCE_SECONDS + 1})
    async with running_engine(workers) as engine:
        assert engine.health() == Health(
            HealthState.DEAD, "instance 0 has been silent for more than 4 s", {0: Trouble.SILENT}
        )


async def test_an_engine_without_any_instance_is_unhealthy_until_one_joins() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        workers.post(InstanceLost(0.0, 0, "killed", returns=True))
        await until(lambda: not engine.health().is_alive)
        assert engine.health().message == "instance 0 was lost and is being started again"
        workers.post(InstanceJoined(0.0, INSTANCES[0]))
        await until(lambda: engine.health().is_alive)
        assert engine.health().message == "ok"


async def test_nothing_is_reported_to_run_or_wait_once_an_engine_has_failed() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.post(InstanceLost(0.0, 0, "it fell over"))
        with pytest.raises(EngineStoppedError):
            await asking
        snapshot = engine.snapshot()
        assert not snapshot.request
        assert snapshot.kv_used == 0
        assert snapshot.stats.num_arrived == 1
        assert "it fell over" in engine.health().message


async def test_requests_after_an_engine_has_failed_end_at_once() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        held = asyncio.create_task(first_token(engine, with_schema("held")))
        await until(lambda: "held" in workers.grammars)
        workers.post(InstanceLost(0.0, 0, "it fell over"))
        with pytest.raises(EngineStoppedError):
            await held
        workers.grammars["held"].set_result(None)  # too late for any request to arrive
        for late in (REQUEST, with_schema("late")):
            with pytest.raises(EngineStoppedError):
                await first_token(engine, late)
        assert engine.snapshot().stats.num_arrived == 0
        assert "late" not in workers.grammars


async def test_what_a_policy_fails_ends_with_its_reason() -> None:
    async with running_engine(IdleWorkers(), fail_all) as engine:
        with pytest.raises(ClusterError, match="no room"):
            await first_token(engine)
        assert not engine.snapshot().request
        assert engine.health().is_alive


async def test_a_request_over_the_limit_that_a_policy_fails_is_itself_at_fault() -> None:
    large = replace(REQUEST, sampling_params=SamplingParams(max_tokens=99))  # KV for 3 + 98 of 100 tokens
    async with running_engine(IdleWorkers(), fail_all) as engine:
        with pytest.raises(InvalidRequestError, match="no room"):
            await first_token(engine, large)
        assert engine.health().is_alive


async def test_a_request_over_the_limit_that_has_begun_is_not_at_fault() -> None:
    def fail_begun(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        begun = [view.request_id for view in snapshot.running if view.is_plannable]
        failures = tuple(Failure(request_id, "no room") for request_id in begun)
        return IterationPlan(failures=failures) if begun else prefill_all(snapshot, cost_model)

    workers = IdleWorkers()
    large = replace(REQUEST, sampling_params=SamplingParams(max_tokens=99))
    async with running_engine(workers, fail_begun) as engine:
        with TokenStream(engine, large) as tokens:
            await until(lambda: bool(engine.snapshot().batches))
            workers.post(TokensProduced(0.0, 1, 0, (ProducedToken("a", 7),)))
            workers.post(BatchFinished(0.0, 1, 1))
            assert (await anext(tokens)).token_id == 7
            with pytest.raises(ClusterError, match="no room"):
                await anext(tokens)


async def test_a_request_that_cannot_be_encoded_fails_alone() -> None:
    workers = IdleWorkers(now=1e6)
    async with running_engine(workers) as engine:
        params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "\ud800"))  # half of a surrogate pair
        with pytest.raises(ClusterError, match="cannot be sent to workers"):
            await first_token(engine, replace(REQUEST, sampling_params=params))
        asking = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        assert [*engine.snapshot().request] == ["a"]
        workers.now += HEALTHY_STEP_SECONDS
        assert engine.health().is_alive
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_request_with_a_schema_waits_for_its_grammar_and_holds_up_nobody() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        held = asyncio.create_task(first_token(engine, with_schema("held", num_choices=2)))
        await until(lambda: "held" in workers.grammars)
        quick = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.grammars["held"].set_result(None)
        await until(lambda: engine.snapshot().stats.num_arrived == 3)
        for asking in (held, quick):
            asking.cancel()
        await until_waiting(engine, 0)


async def test_a_request_whose_client_leaves_before_its_grammar_is_there_never_arrives() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine, with_schema("left", num_choices=2)))
        await until(lambda: "left" in workers.grammars)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        workers.grammars["left"].set_result(None)
        other = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        assert engine.snapshot().stats.num_arrived == 1
        other.cancel()
        await until_waiting(engine, 0)


async def test_a_choice_that_is_left_before_its_grammar_is_there_is_left_alone() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        request = with_schema("shared", num_choices=3)
        left, *others = request.choice_ids
        engine.submit(request, lambda _: None)
        engine.abort(left)
        workers.grammars["shared"].set_result(None)
        await until(lambda: engine.snapshot().stats.num_ended == 1)
        assert engine.snapshot().stats.num_arrived == 3
        assert [view.request_id for view in engine.snapshot().waiting] == others[
            :1
        ]  # whose prompt is others'
        for choice_id in others:
            engine.abort(choice_id)
        await until(lambda: engine.snapshot().stats.num_ended == 3)


async def test_a_request_whose_grammar_cannot_be_made_fails_alone() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine, with_schema("bad", num_choices=2)))
        other = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.grammars["bad"].set_exception(ClusterError("instance 1 could not compile a grammar"))
        with pytest.raises(ClusterError, match="instance 1 could not compile a grammar"):
            await asking
        assert not other.done()
        assert engine.snapshot().stats.num_arrived == 1
        other.cancel()
        await until_waiting(engine, 0)


SCORED = replace(REQUEST, sampling_params=SamplingParams(max_tokens=1), num_prompt_logprobs=1)


def part(position: int) -> PromptLogprobs:
    return PromptLogprobs("a", range(position, position + 1), [-0.5], [1], [[position]], [[-0.5]])


async def end_with_first_token(workers: IdleWorkers, engine: Engine) -> None:
    """Let the only request have its first token, which is its last, and its batch end."""
    await until(lambda: bool(engine.snapshot().batches))
    workers.post(TokensProduced(0.0, 1, 0, (ProducedToken("a", 7, FinishReason.LENGTH),)))
    workers.post(BatchFinished(0.0, 1, 1))
    await until(lambda: engine.snapshot().stats.num_ended == 1)


async def test_a_token_waits_for_all_parts_of_what_is_said_of_the_prompt() -> None:
    workers = IdleWorkers()
    async with running_engine(workers, prefill_all) as engine:
        with TokenStream(engine, SCORED) as tokens:
            workers.take_prompt_logprobs(part(2))
            await end_with_first_token(workers, engine)
            asking = asyncio.ensure_future(anext(tokens))
            await asyncio.sleep(0)
            assert not asking.done()
            workers.take_prompt_logprobs(part(1))
            assert (await asking).token_id == 7
            found = tokens.prompt_logprobs
            with pytest.raises(StopAsyncIteration):
                await anext(tokens)
    assert found == PromptLogprobs("a", range(1, 3), [-0.5, -0.5], [1, 1], [[1, 2]], [[-0.5, -0.5]])


async def test_a_token_that_waits_when_the_engine_fails_never_comes() -> None:
    workers = IdleWorkers()
    async with running_engine(workers, prefill_all) as engine:
        with TokenStream(engine, SCORED) as tokens:
            await end_with_first_token(workers, engine)
            workers.post(InstanceLost(0.0, 0, "it fell over"))
            with pytest.raises(EngineStoppedError):
                await anext(tokens)


async def test_what_comes_of_a_prompt_whose_client_has_left_is_dropped() -> None:
    workers = IdleWorkers()
    async with running_engine(workers, prefill_all) as engine:
        with TokenStream(engine, SCORED) as tokens:
            await end_with_first_token(workers, engine)
        for position in (1, 2):
            workers.take_prompt_logprobs(part(position))
        assert tokens.prompt_logprobs is None
        assert engine.health().is_alive
