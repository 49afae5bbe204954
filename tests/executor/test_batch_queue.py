"""Instructions wait for the batches that they depend on. Each instance runs its batches in order."""

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
from loong.core.plan import BatchPlan, KVMigration
from loong.core.request import FinishReason, SamplingParams
from loong.executor.batch_queue import BatchQueue, Ready
from loong.executor.in_flight import InFlight, Stage

VIEW = decoding("r", 4, (0,))
MOVE = MoveKV(9, KVMigration(KVSegment("r", range(4), 0), 1))
TOKEN = ProducedToken("r", 60)
PARAMS = SamplingParams()


def prompt(*group: InstanceId) -> RunBatch:
    """Batch 1: the prompt of r, whose token the last of the group samples."""
    plan = prefill([waiting("r", 4)], group, masters=group[-1:])
    return RunBatch(1, plan, (RequestInput("r", (1, 2, 3, 4), 4, 0, VIEW.placement, SamplingParams()),))


def dependent(master_id: InstanceId, *, grammar: Grammar | None = None, batch_id: int = 2) -> RunBatch:
    """Return a step of r, whose newest token comes of batch 1."""
    params = SamplingParams(grammar=grammar)
    given = RequestInput("r", (), 4, 1, VIEW.placement, params, depends_on_batch_id=1)
    return RunBatch(batch_id, decode([VIEW], (0, 1), {"r": master_id}), (given,))


class Queue(BatchQueue):
    """A queue that counts a batch as in flight when it takes it."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        super().__init__(self.in_flight)

    def take(self, instruction: Instruction) -> Ready | None:
        if isinstance(instruction, RunBatch):
            self.in_flight.add(instruction)
        return super().take(instruction)

    def forget(self, batch_id: int) -> None:
        """Let the engine see the end of a batch."""
        self.in_flight[batch_id].send()
        self.in_flight[batch_id].move_to(Stage.ENDED)
        self.in_flight.report(batch_id)


def taken(queue: Queue, instruction: Instruction) -> Instruction | None:
    """Return the instruction as it is to be carried out; None if it is held."""
    ready = queue.take(instruction)
    return None if ready is None else ready.instruction


def released(queue: Queue, batch_id: int, *tokens: ProducedToken) -> list[Instruction]:
    """Return the instructions that the end of a batch releases."""
    return [ready.instruction for ready in queue.end(batch_id, tokens).ready]


def inputs_of(reported: Sequence[Instruction]) -> Sequence[RequestInput]:
    (run,) = reported
    assert isinstance(run, RunBatch)
    return run.inputs


def test_a_batch_may_be_reported_at_once_where_its_master_samples_what_it_follows() -> None:
    queue = Queue()
    assert taken(queue, prompt(1, 0)) == prompt(1, 0)
    assert taken(queue, dependent(0)) == dependent(0)
    assert released(queue, 1, TOKEN) == []


@pytest.mark.parametrize(
    "reported",
    [dependent(1), dependent(0, grammar=Grammar(GrammarKind.REGEX, "a"))],
    ids=["elsewhere", "grammar"],
)
def test_a_batch_waits_for_a_token_that_its_master_cannot_know(reported: RunBatch) -> None:
    queue = Queue()
    queue.take(prompt(0))
    assert taken(queue, reported) is None
    (given,) = inputs_of(released(queue, 1, TOKEN))
    assert given == reported.inputs[0].with_token(TOKEN)
    assert given.token_ids == (60,)
    assert released(queue, 2) == []


def test_a_batch_that_waits_for_two_has_the_tokens_of_both() -> None:
    queue, other = Queue(), decoding("s", 4, (1,))
    queue.take(prompt(0))
    second = RunBatch(
        2, prefill([waiting("s", 4)], (1,)), (RequestInput("s", (1, 2, 3, 4), 4, 0, other.placement, PARAMS),)
    )
    queue.take(second)
    plan = decode([VIEW, other], (0, 1), {"r": 1, "s": 0})
    follow = (
        RequestInput("r", (), 4, 1, VIEW.placement, PARAMS, depends_on_batch_id=1),
        RequestInput("s", (), 4, 1, other.placement, PARAMS, depends_on_batch_id=2),
    )
    assert taken(queue, RunBatch(3, plan, follow)) is None
    assert released(queue, 1, TOKEN) == []
    queue.forget(1)
    given = inputs_of(released(queue, 2, ProducedToken("s", 61)))
    assert [item.token_ids for item in given] == [(60,), (61,)]


def test_a_request_that_ended_with_that_token_ends_with_the_next() -> None:
    queue = Queue()
    queue.take(prompt(0))
    queue.take(dependent(1))
    (given,) = inputs_of(released(queue, 1, TOKEN._replace(finish_reason=FinishReason.STOP)))
    assert given.sampling_params == SamplingParams(max_tokens=2)


def test_nobody_waits_for_what_is_known_by_now() -> None:
    queue = Queue()
    queue.take(prompt(0))
    released(queue, 1, TOKEN)
    assert taken(queue, dependent(1)) == RunBatch(
        2, dependent(1).plan, (dependent(1).inputs[0].with_token(TOKEN),)
    )
    queue.forget(1)
    assert taken(queue, dependent(1, batch_id=3)) == dependent(1, batch_id=3)


@pytest.mark.parametrize("reported", [StopLease(2, ESPGroup((0, 1)), 1), ExtendLease(2, ESPGroup((0, 1)), 9)])
def test_what_is_said_of_a_batch_comes_after_it(reported: Instruction) -> None:
    queue = Queue()
    queue.take(prompt(0))
    assert taken(queue, reported) == reported
    queue.take(dependent(1))
    assert taken(queue, reported) is None
    run, then = released(queue, 1, TOKEN)
    assert isinstance(run, RunBatch)
    assert then == reported
    assert taken(queue, reported) == reported


def test_kv_moves_when_the_batch_that_makes_some_of_it_has_ended() -> None:
    queue = Queue()
    assert taken(queue, MOVE) == MOVE
    queue.take(prompt(0))
    assert taken(queue, MOVE) is None
    release = ReleaseKV("r", (0,))
    assert taken(queue, release) == release
    assert released(queue, 1, TOKEN) == [MOVE]
    assert taken(queue, MOVE) == MOVE


def test_a_batch_whose_kv_is_served_waits_until_all_of_it_is_made() -> None:
    queue = Queue()
    queue.take(prompt(0))
    plan = decode([VIEW], (1,), {"r": 1})
    served = RunBatch(2, plan, (RequestInput("r", (60,), 4, 1, VIEW.placement, PARAMS),))
    assert served.holder_ids == (0,)
    assert taken(queue, served) is None
    assert released(queue, 1) == [served]


def run(batch_id: int, *group: InstanceId) -> RunBatch:
    return RunBatch(batch_id, BatchPlan(ESPGroup(group), (), ()), ())


def begins(queue: Queue, batch_id: int, *group: InstanceId) -> bool:
    """Return whether a batch begins at once."""
    ready = queue.take(run(batch_id, *group))
    assert ready is not None
    return ready.begins


def begun(queue: Queue, batch_id: int) -> list[int]:
    """Return the batches that begin with the end of a batch."""
    return [batch.batch_id for batch in queue.end(batch_id).begun]


def test_a_batch_begins_when_all_its_instances_have_ended_those_before() -> None:
    queue = Queue()
    assert begins(queue, 1, 0, 1)
    assert begins(queue, 2, 2)
    assert not begins(queue, 3, 1, 2)
    assert not begins(queue, 4, 0)
    assert queue.in_flight[3].behind == {1, 2}
    assert begun(queue, 2) == []
    assert begun(queue, 1) == [3, 4]
    assert not begins(queue, 5, 2)
    assert begins(queue, 6, 3)
    assert begun(queue, 3) == [5]
    assert begun(queue, 4) == []
    assert begins(queue, 7, 0)


def test_batches_behind_one_another_begin_one_by_one() -> None:
    queue = Queue()
    assert [begins(queue, n, 0) for n in (1, 2, 3)] == [True, False, False]
    assert begun(queue, 1) == [2]
    assert begun(queue, 2) == [3]
    assert begun(queue, 3) == []
    assert begins(queue, 4, 0)


def test_a_held_batch_begins_behind_those_that_became_ready_before() -> None:
    queue = Queue()
    queue.take(prompt(0))
    assert queue.take(dependent(1)) is None
    assert not begins(queue, 3, 0)
    (ready,), begins_now = queue.end(1, [TOKEN])
    assert not ready.begins
    assert [batch.batch_id for batch in begins_now] == [3]
    assert begun(queue, 3) == [2]
