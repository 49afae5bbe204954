"""What is told too early waits for the end of a batch, and nothing else does."""

from collections.abc import Sequence

import pytest
from plans import decode, prefill
from snapshots import decoding, waiting

from loong.core.events import ProducedToken
from loong.core.grammar import Grammar, GrammarKind
from loong.core.instance import ESPGroup
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    MoveKV,
    ReleaseKV,
    RequestInput,
    RunBatch,
    StopLease,
)
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import KVMigration
from loong.core.request import FinishReason, SamplingParams
from loong.executor.holding import Holding

VIEW = decoding("r", 4, (0,))
MOVE = MoveKV(9, KVMigration(KVSegment("r", range(4), 0), 1))
TOKEN = ProducedToken("r", 60)
PARAMS = SamplingParams()


def prompt(*group: InstanceId) -> RunBatch:
    """Batch 1: the prompt of r, whose token the last of the group samples."""
    plan = prefill([waiting("r", 4)], group, masters=group[-1:])
    return RunBatch(1, plan, (RequestInput("r", (1, 2, 3, 4), 4, 0, VIEW.placement, SamplingParams()),))


def following(master_id: InstanceId, *, grammar: Grammar | None = None, batch_id: int = 2) -> RunBatch:
    """A step of r, whose newest token comes of batch 1."""
    params = SamplingParams(grammar=grammar)
    given = RequestInput("r", (), 4, 1, VIEW.placement, params, follows=1)
    return RunBatch(batch_id, decode([VIEW], (0, 1), {"r": master_id}), (given,))


def inputs_of(told: Sequence[Instruction | None]) -> Sequence[RequestInput]:
    (run,) = told
    assert isinstance(run, RunBatch)
    return run.inputs


def test_a_batch_may_be_told_at_once_where_its_master_samples_what_it_follows() -> None:
    holding = Holding()
    assert holding.take(prompt(1, 0)) == prompt(1, 0)
    assert holding.take(following(0)) == following(0)
    assert holding.end(1, [TOKEN]) == []


@pytest.mark.parametrize(
    "told",
    [following(1), following(0, grammar=Grammar(GrammarKind.REGEX, "a"))],
    ids=["elsewhere", "grammar"],
)
def test_a_batch_waits_for_a_token_that_its_master_cannot_know(told: RunBatch) -> None:
    holding = Holding()
    holding.take(prompt(0))
    assert holding.take(told) is None
    (given,) = inputs_of(holding.end(1, [TOKEN]))
    assert given == told.inputs[0].following(TOKEN)
    assert given.token_ids == (60,)
    assert holding.end(2) == []


def test_a_batch_that_waits_for_two_has_the_tokens_of_both() -> None:
    holding, other = Holding(), decoding("s", 4, (1,))
    holding.take(prompt(0))
    second = RunBatch(
        2, prefill([waiting("s", 4)], (1,)), (RequestInput("s", (1, 2, 3, 4), 4, 0, other.placement, PARAMS),)
    )
    holding.take(second)
    plan = decode([VIEW, other], (0, 1), {"r": 1, "s": 0})
    follow = (
        RequestInput("r", (), 4, 1, VIEW.placement, PARAMS, follows=1),
        RequestInput("s", (), 4, 1, other.placement, PARAMS, follows=2),
    )
    assert holding.take(RunBatch(3, plan, follow)) is None
    assert holding.end(1, [TOKEN]) == []
    holding.forget(1)
    given = inputs_of(holding.end(2, [ProducedToken("s", 61)]))
    assert [item.token_ids for item in given] == [(60,), (61,)]


def test_whoever_ended_with_that_token_ends_with_the_next() -> None:
    holding = Holding()
    holding.take(prompt(0))
    holding.take(following(1))
    (given,) = inputs_of(holding.end(1, [TOKEN._replace(finish_reason=FinishReason.STOP)]))
    assert given.sampling_params == SamplingParams(max_tokens=2)


def test_nobody_waits_for_what_is_known_by_now() -> None:
    holding = Holding()
    holding.take(prompt(0))
    holding.end(1, [TOKEN])
    assert holding.take(following(1)) == RunBatch(
        2, following(1).plan, (following(1).inputs[0].following(TOKEN),)
    )
    holding.forget(1)
    assert holding.take(following(1, batch_id=3)) == following(1, batch_id=3)


@pytest.mark.parametrize("told", [StopLease(2, ESPGroup((0, 1)), 1), ExtendLease(2, ESPGroup((0, 1)), 9)])
def test_what_is_said_of_a_batch_comes_after_it(told: Instruction) -> None:
    holding = Holding()
    holding.take(prompt(0))
    assert holding.take(told) == told
    holding.take(following(1))
    assert holding.take(told) is None
    run, then = holding.end(1, [TOKEN])
    assert isinstance(run, RunBatch)
    assert then == told
    assert holding.take(told) == told


def test_kv_moves_when_the_batch_that_makes_some_of_it_has_ended() -> None:
    holding = Holding()
    assert holding.take(MOVE) == MOVE
    holding.take(prompt(0))
    assert holding.take(MOVE) is None
    release = ReleaseKV("r", (0,))
    assert holding.take(release) == release
    assert holding.end(1, [TOKEN]) == [MOVE]
    assert holding.take(MOVE) == MOVE
