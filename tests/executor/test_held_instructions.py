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
from loong.executor.held_instructions import HeldInstructions

VIEW = decoding("r", 4, (0,))
MOVE = MoveKV(9, KVMigration(KVSegment("r", range(4), 0), 1))
TOKEN = ProducedToken("r", 60)
PARAMS = SamplingParams()


def prompt(*group: InstanceId) -> RunBatch:
    """Batch 1: the prompt of r, whose token the last of the group samples."""
    plan = prefill([waiting("r", 4)], group, masters=group[-1:])
    return RunBatch(1, plan, (RequestInput("r", (1, 2, 3, 4), 4, 0, VIEW.placement, SamplingParams()),))


def dependent(master_id: InstanceId, *, grammar: Grammar | None = None, batch_id: int = 2) -> RunBatch:
    """A step of r, whose newest token comes of batch 1."""
    params = SamplingParams(grammar=grammar)
    given = RequestInput("r", (), 4, 1, VIEW.placement, params, depends_on_batch_id=1)
    return RunBatch(batch_id, decode([VIEW], (0, 1), {"r": master_id}), (given,))


def inputs_of(reported: Sequence[Instruction | None]) -> Sequence[RequestInput]:
    (run,) = reported
    assert isinstance(run, RunBatch)
    return run.inputs


def test_a_batch_may_be_reported_at_once_where_its_master_samples_what_it_follows() -> None:
    held_instructions = HeldInstructions()
    assert held_instructions.take(prompt(1, 0)) == prompt(1, 0)
    assert held_instructions.take(dependent(0)) == dependent(0)
    assert held_instructions.end(1, [TOKEN]) == []


@pytest.mark.parametrize(
    "reported",
    [dependent(1), dependent(0, grammar=Grammar(GrammarKind.REGEX, "a"))],
    ids=["elsewhere", "grammar"],
)
def test_a_batch_waits_for_a_token_that_its_master_cannot_know(reported: RunBatch) -> None:
    held_instructions = HeldInstructions()
    held_instructions.take(prompt(0))
    assert held_instructions.take(reported) is None
    (given,) = inputs_of(held_instructions.end(1, [TOKEN]))
    assert given == reported.inputs[0].with_token(TOKEN)
    assert given.token_ids == (60,)
    assert held_instructions.end(2) == []


def test_a_batch_that_waits_for_two_has_the_tokens_of_both() -> None:
    held_instructions, other = HeldInstructions(), decoding("s", 4, (1,))
    held_instructions.take(prompt(0))
    second = RunBatch(
        2, prefill([waiting("s", 4)], (1,)), (RequestInput("s", (1, 2, 3, 4), 4, 0, other.placement, PARAMS),)
    )
    held_instructions.take(second)
    plan = decode([VIEW, other], (0, 1), {"r": 1, "s": 0})
    follow = (
        RequestInput("r", (), 4, 1, VIEW.placement, PARAMS, depends_on_batch_id=1),
        RequestInput("s", (), 4, 1, other.placement, PARAMS, depends_on_batch_id=2),
    )
    assert held_instructions.take(RunBatch(3, plan, follow)) is None
    assert held_instructions.end(1, [TOKEN]) == []
    held_instructions.forget(1)
    given = inputs_of(held_instructions.end(2, [ProducedToken("s", 61)]))
    assert [item.token_ids for item in given] == [(60,), (61,)]


def test_whoever_ended_with_that_token_ends_with_the_next() -> None:
    held_instructions = HeldInstructions()
    held_instructions.take(prompt(0))
    held_instructions.take(dependent(1))
    (given,) = inputs_of(held_instructions.end(1, [TOKEN._replace(finish_reason=FinishReason.STOP)]))
    assert given.sampling_params == SamplingParams(max_tokens=2)


def test_nobody_waits_for_what_is_known_by_now() -> None:
    held_instructions = HeldInstructions()
    held_instructions.take(prompt(0))
    held_instructions.end(1, [TOKEN])
    assert held_instructions.take(dependent(1)) == RunBatch(
        2, dependent(1).plan, (dependent(1).inputs[0].with_token(TOKEN),)
    )
    held_instructions.forget(1)
    assert held_instructions.take(dependent(1, batch_id=3)) == dependent(1, batch_id=3)


@pytest.mark.parametrize("reported", [StopLease(2, ESPGroup((0, 1)), 1), ExtendLease(2, ESPGroup((0, 1)), 9)])
def test_what_is_said_of_a_batch_comes_after_it(reported: Instruction) -> None:
    held_instructions = HeldInstructions()
    held_instructions.take(prompt(0))
    assert held_instructions.take(reported) == reported
    held_instructions.take(dependent(1))
    assert held_instructions.take(reported) is None
    run, then = held_instructions.end(1, [TOKEN])
    assert isinstance(run, RunBatch)
    assert then == reported
    assert held_instructions.take(reported) == reported


def test_kv_moves_when_the_batch_that_makes_some_of_it_has_ended() -> None:
    held_instructions = HeldInstructions()
    assert held_instructions.take(MOVE) == MOVE
    held_instructions.take(prompt(0))
    assert held_instructions.take(MOVE) is None
    release = ReleaseKV("r", (0,))
    assert held_instructions.take(release) == release
    assert held_instructions.end(1, [TOKEN]) == [MOVE]
    assert held_instructions.take(MOVE) == MOVE


def test_a_batch_whose_kv_is_served_waits_until_all_of_it_is_made() -> None:
    held_instructions = HeldInstructions()
    held_instructions.take(prompt(0))
    plan = decode([VIEW], (1,), {"r": 1})
    served = RunBatch(2, plan, (RequestInput("r", (60,), 4, 1, VIEW.placement, PARAMS),))
    assert served.holder_ids == (0,)
    assert held_instructions.take(served) is None
    assert held_instructions.end(1) == [served]
