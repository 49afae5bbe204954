"""Ends that are predicted: what is planned before they come, and what when they come otherwise."""

from dataclasses import replace

import pytest
from plans import both, decode, move, prefill

from loong.core.applied import Applied
from loong.core.errors import InvalidEventError, InvalidPlanError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    InstanceLost,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction, MoveKV, ReleaseKV, RunBatch
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, Failure, IterationPlan, KVMigration, Preemption
from loong.core.request import FinishReason, Request, RequestId, RequestView, SamplingParams
from loong.state.cluster_state import ClusterState

PROMPT = (50, 51, 52, 53)
CAPACITY = 40


def cluster(*request_ids: RequestId, max_tokens: int = 8, num_choices: int = 1) -> ClusterState:
    """Return three instances, and requests that wait."""
    state = ClusterState(tuple(ElasticInstance(i, 1, InstanceKind.FULL, CAPACITY) for i in range(3)))
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(0,))
    for request_id in request_ids:
        state.apply(
            RequestArrived(
                0.0, Request(request_id, PROMPT, params, arrival_time=0.0, num_choices=num_choices)
            )
        )
    return state


def view(state: ClusterState, request_id: RequestId = "r") -> RequestView:
    return state.snapshot(9.0).request[request_id]


def commit(state: ClusterState, *batches: BatchPlan, now: float = 0.0) -> tuple[Instruction, ...]:
    return state.commit(IterationPlan(batches), state.snapshot(now))


def prompts(state: ClusterState, *request_ids: RequestId, num_tokens: int | None = None) -> BatchPlan:
    """Return a batch of prompts on instance 0."""
    return prefill([view(state, i) for i in request_ids], (0,), num_tokens=num_tokens)


def step(
    state: ClusterState, group: tuple[InstanceId, ...] = (0,), request_id: RequestId = "r", num_steps: int = 1
) -> BatchPlan:
    """Decode steps with the last of the group as master."""
    return decode([view(state, request_id)], group, {request_id: group[-1]}, num_steps=num_steps)


def produced(
    batch_id: int, token_id: int = 60, reason: FinishReason | None = None, request_id: RequestId = "r"
) -> TokensProduced:
    return TokensProduced(5.0, batch_id, 0, (ProducedToken(request_id, token_id, reason),))


def predicted(max_tokens: int = 8) -> ClusterState:
    """The prompt of r is batch 1, whose end is predicted at 4.0."""
    state = cluster("r", max_tokens=max_tokens)
    commit(state, prompts(state, "r"))
    assert state.apply(BatchEndPredicted(3.0, 1, 4.0)) == Applied((), needs_plan=True)
    state.check()
    return state


def used(state: ClusterState) -> list[int]:
    state.check()
    return [instance.kv_used for instance in state.snapshot(9.0).instances]


@pytest.mark.parametrize("num_tokens", [None, 3])
def test_what_is_predicted_is_what_comes(num_tokens: int | None) -> None:
    state = cluster("r", "s", max_tokens=2)
    commit(state, prompts(state, "s"))
    state.apply(produced(1, request_id="s"))
    state.apply(BatchFinished(1.0, 1, 1))
    commit(state, both(step(state, request_id="s"), prompts(state, "r", num_tokens=num_tokens)))
    state.apply(BatchEndPredicted(4.0, 2, 5.0))
    before = state.snapshot(5.0)
    assert before.instances[0].is_idle
    assert before.request.keys() == {"r"}  # the other comes to its length
    assert before.leaving == {0: 5}
    reported = [ProducedToken("s", 61, FinishReason.LENGTH)]
    if num_tokens is None:
        reported.append(ProducedToken("r", 62))
    state.apply(TokensProduced(5.0, 2, 0, tuple(reported)))
    state.apply(BatchFinished(5.0, 2, 1))
    after = state.snapshot(5.0)
    assert before.request == after.request
    assert [i.kv_used - before.leaving.get(i.instance_id, 0) for i in before.instances] == used(state)


def test_who_is_to_have_a_token_that_nobody_knows_follows_its_batch() -> None:
    state = predicted()
    assert view(state).is_decoding
    assert view(state).first_token_time == view(state).last_token_time == 4.0
    (run,) = commit(state, step(state), now=3.0)
    assert isinstance(run, RunBatch)
    (given,) = run.inputs
    assert (given.token_ids, given.num_output_tokens, given.depends_on_batch_id) == ((), 1, 1)
    assert given.sampling_params is not None
    known = given.with_token(ProducedToken("r", 60))
    assert (known.token_ids, known.num_output_tokens, known.depends_on_batch_id) == ((60,), 1, None)
    assert known.sampling_params == given.sampling_params
    ended = given.with_token(ProducedToken("r", 0, FinishReason.STOP))
    assert ended.sampling_params == replace(given.sampling_params, max_tokens=2)
    state.apply(produced(1))
    state.apply(BatchFinished(5.0, 1, 1))
    state.apply(TokensProduced(6.0, 2, 0, (ProducedToken("r", 61),)))
    state.apply(BatchFinished(6.0, 2, 1))
    (run,) = commit(state, step(state), now=6.0)
    assert isinstance(run, RunBatch)
    assert (run.inputs[0].token_ids, run.inputs[0].depends_on_batch_id) == ((61,), None)
    assert used(state) == [6, 0, 0]


def test_of_a_prompt_that_goes_on_all_is_known() -> None:
    state = cluster("r")
    commit(state, prompts(state, "r", num_tokens=3))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    (run,) = commit(state, prompts(state, "r"), now=3.0)
    assert isinstance(run, RunBatch)
    assert (run.inputs[0].token_ids, run.inputs[0].depends_on_batch_id) == (PROMPT[3:], None)


def test_a_batch_that_was_reported_behind_another_starts_when_the_executor_says_so() -> None:
    state = predicted()
    commit(state, step(state, (0, 1)), now=3.0)
    (running,) = state.snapshot(3.5).batches
    assert (running.started_at, running.stepped_at, running.has_started) == (4.0, 4.0, False)
    state.apply(produced(1))
    state.apply(BatchFinished(5.0, 1, 1))
    assert state.apply(BatchStarted(5.25, 2)) == Applied((), needs_plan=False)
    (running,) = state.snapshot(5.5).batches
    assert (running.started_at, running.stepped_at, running.has_started) == (5.25, 5.25, True)


def test_a_batch_may_start_before_others_have_ended_the_one_before_but_only_once() -> None:
    state = cluster("r", "s")
    commit(state, prefill([view(state)], (0, 1), masters=(0,), keep_on=(0,)))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    commit(state, prefill([view(state, "s")], (1,)), now=3.0)
    state.apply(BatchStarted(3.5, 2))  # instance 1 was done with batch 1 long before the other
    state.apply(produced(1))
    state.apply(BatchFinished(6.0, 1, 1))
    (running,) = state.snapshot(6.0).batches
    assert running.started_at == 3.5
    with pytest.raises(InvalidEventError, match="batch 2 started, but has started before"):
        state.apply(BatchStarted(6.0, 2))
    with pytest.raises(InvalidEventError, match="batch 1 started, but is not running"):
        state.apply(BatchStarted(6.0, 1))


def test_no_plan_is_called_for_when_an_end_is_as_predicted_and_planned_for() -> None:
    state = predicted()
    commit(state, step(state), now=3.0)
    for event in (produced(1), BatchFinished(5.0, 1, 1)):
        assert not state.apply(event).needs_plan
    assert not state.apply(BatchEndPredicted(3.0, 1, 4.0)).needs_plan  # too late


def test_one_is_called_for_when_nothing_was_planned_or_room_comes_free() -> None:
    state = predicted()
    state.apply(produced(1))
    end = BatchFinished(5.0, 1, 1)
    assert state.apply(end).needs_plan
    state = cluster("r", "s", max_tokens=1)
    commit(state, prompts(state, "r"))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    commit(state, prompts(state, "s"), now=3.0)
    state.apply(produced(1, reason=FinishReason.LENGTH))
    applied = state.apply(end)
    assert (applied.instructions, applied.needs_plan) == ((ReleaseKV("r", (0,)),), True)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_who_ends_unpredicted_leaves_with_the_next_batch(num_steps: int) -> None:
    state = predicted()
    commit(state, step(state, num_steps=num_steps), now=3.0)
    state.apply(produced(1, 0, FinishReason.STOP))
    assert state.apply(BatchFinished(5.0, 1, 1)).instructions == ()
    assert view(state).has_ended
    assert view(state).num_output_tokens == 1
    state.apply(TokensProduced(6.0, 2, 0, (ProducedToken("r", 61, FinishReason.LENGTH),)))
    assert state.apply(BatchFinished(6.0, 2, 1)).instructions == (ReleaseKV("r", (0,)),)
    assert state.snapshot(6.0).stats.num_output_tokens == 1
    assert used(state) == [0, 0, 0]


def test_who_is_aborted_meanwhile_leaves_when_nothing_touches_it() -> None:
    state = predicted()
    assert state.apply(RequestAborted(3.0, "r")).instructions == ()
    assert not state.snapshot(3.0).request
    assert state.snapshot(3.0).leaving == {0: len(PROMPT)}
    state.apply(produced(1))
    assert state.apply(BatchFinished(5.0, 1, 1)).instructions == (ReleaseKV("r", (0,)),)
    state = cluster("r")
    commit(state, prompts(state, "r"))
    state.apply(RequestAborted(2.0, "r"))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    assert not state.snapshot(3.0).request
    state.check()


def test_who_fails_meanwhile_is_counted_as_leaving() -> None:
    state = predicted()
    snapshot = state.snapshot(3.0)
    assert state.commit(IterationPlan(failures=(Failure("r", "no room"),)), snapshot) == ()
    assert not state.snapshot(3.0).request
    assert state.snapshot(3.0).leaving == {0: len(PROMPT)}
    state.apply(produced(1))
    assert state.apply(BatchFinished(5.0, 1, 1)).instructions == (ReleaseKV("r", (0,)),)
    state.check()


def test_a_loss_voids_what_was_predicted() -> None:
    state = cluster("r", max_tokens=1)
    commit(state, prefill([view(state)], (0, 1)))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    assert not state.snapshot(3.0).request
    released = state.apply(InstanceLost(3.5, 1)).instructions
    assert all(isinstance(one, ReleaseKV) and one.is_void and one.instance_ids == (0,) for one in released)
    assert view(state).num_output_tokens == 0
    assert not view(state).has_begun
    assert [i.kv_used for i in state.snapshot(4.0).instances] == [0, 0]
    state.check()
    with pytest.raises(InvalidEventError, match="batch 1 produced tokens, but is not running"):
        state.apply(produced(1))


def test_a_loss_in_the_next_batch_leaves_the_one_before_as_it_is() -> None:
    state = predicted()
    commit(state, step(state, (0, 1)), now=3.0)
    before = view(state).placement
    state.apply(InstanceLost(3.5, 1))
    state.check()
    assert view(state).placement == before
    state.apply(produced(1))
    assert state.apply(BatchFinished(5.0, 1, 1)).instructions == ()
    assert view(state).is_decoding
    state.check()


def test_a_batch_behind_a_lost_one_of_the_same_request_is_void_too() -> None:
    state = cluster("r", "s")
    commit(state, prefill([view(state, "s")], (1, 0), masters=(1,), keep_on=(0,)), now=0.0)
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    commit(state, both(step(state, request_id="s"), prompts(state, "r")), now=3.0)
    state.apply(InstanceLost(3.5, 1))
    state.check()
    assert not state.snapshot(4.0).batches
    assert {v.request_id for v in state.snapshot(4.0).waiting} == {"r", "s"}
    with pytest.raises(InvalidEventError, match="batch 2 produced tokens, but is not running"):
        state.apply(produced(2))


def test_each_destination_releases_once_the_slots_of_kv_that_a_lost_batch_was_to_make() -> None:
    state = cluster("r")
    commit(state, prefill([view(state)], (0, 1, 2)))
    state.apply(BatchEndPredicted(3.0, 1, 4.0))
    arriving = {1: range(1), 2: range(3, 4)}
    moves = tuple(KVMigration(KVSegment("r", one, 0), to) for to, one in arriving.items())
    state.commit(IterationPlan(migrations=moves), state.snapshot(3.0))
    released = [one for one in state.apply(InstanceLost(3.5, 0)).instructions if isinstance(one, ReleaseKV)]
    for instance_id in arriving:
        positions = [p for one in released if instance_id in one.instance_ids for p in one.positions or ()]
        assert sorted(positions) == [0, 1, 2, 3]
    assert {one.instance_ids: one.positions for one in released if not one.is_void} == {
        (instance_id,): positions for instance_id, positions in arriving.items()
    }
    assert used(state) == [0, 0]


def ignored(state: ClusterState, batch_id: int) -> bool:
    """Return whether no end of a batch is predicted."""
    before = state.snapshot(1.0)
    state.apply(BatchEndPredicted(1.0, batch_id, 2.0))
    state.check()
    return replace(state.snapshot(1.0), version=before.version) == before


def test_nothing_is_predicted_where_more_than_tokens_is_unknown() -> None:
    state = cluster("r", num_choices=2)
    commit(state, prompts(state, "r"))
    assert ignored(state, 1)  # siblings begin
    reported = tuple(ProducedToken(request_id, 60) for request_id in ("r", "r-1"))
    state.apply(TokensProduced(1.0, 1, 0, reported))
    state.apply(BatchFinished(1.0, 1, 1))
    commit(state, step(state))
    assert not ignored(state, 2)  # though KV is shared
    state = cluster("r")
    commit(state, prompts(state, "r"))
    state.apply(produced(1))
    state.apply(BatchFinished(1.0, 1, 1))
    commit(state, step(state, num_steps=3))
    assert ignored(state, 2)  # a lease
    assert ignored(state, 7)  # no such batch


def test_the_end_of_a_batch_is_not_predicted_before_that_of_the_one_before() -> None:
    state = predicted()
    commit(state, step(state), now=3.0)
    assert ignored(state, 2)
    state.apply(produced(1))
    state.apply(BatchFinished(5.0, 1, 1))
    assert not ignored(state, 2)


def test_kv_may_be_reported_to_move_but_nobody_is_preempted_whose_batch_is_ending() -> None:
    state = predicted()
    snapshot = state.snapshot(3.0)
    with pytest.raises(InvalidPlanError, match="r is to be preempted, but its batch is still to end"):
        state.commit(IterationPlan(preemptions=(Preemption("r"),)), snapshot)
    (reported,) = state.commit(IterationPlan(migrations=move(view(state), 0, 1)), snapshot)
    assert isinstance(reported, MoveKV)
    assert used(state) == [4, 4, 0]
    state.apply(produced(1))
    state.apply(BatchFinished(5.0, 1, 1))
    assert used(state) == [4, 4, 0]
