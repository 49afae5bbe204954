"""Events and plans in, instructions out: what the state machine does not spell out."""

from dataclasses import replace
from itertools import chain

import pytest

from loong.core.errors import InvalidEventError, InvalidPlanError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceJoined,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    MoveKV,
    ReleaseKV,
    RequestInput,
    RunBatch,
    StopLease,
)
from loong.core.placement import InstanceId, KVSegment, Placement, striped
from loong.core.plan import (
    BatchPlan,
    Eviction,
    Failure,
    IterationPlan,
    KVMigration,
    LeaseEnd,
    LeaseExtension,
    Preemption,
    QueryBlock,
    Transfer,
)
from loong.core.positions import stripe
from loong.core.request import FinishReason, Request, SamplingParams
from loong.state.cluster_state import ClusterState

PARAMS = SamplingParams(max_tokens=8)
PROMPT = (50, 51, 52, 53)


def cluster() -> ClusterState:
    """Return four instances and the request r, which waits."""
    state = ClusterState(tuple(ElasticInstance(i, 1, InstanceKind.FULL, 20) for i in range(4)))
    assert state.apply(RequestArrived(0.0, Request("r", PROMPT, PARAMS, arrival_time=0.0))).instructions == ()
    return state


def prefill(*masters: InstanceId, chunk: range = range(4)) -> BatchPlan:
    blocks = (QueryBlock("r", stripe(chunk, i, len(masters)), m, Transfer.KV) for i, m in enumerate(masters))
    return BatchPlan(ESPGroup(masters), tuple(blocks), striped("r", chunk, masters).segments)


def lease(num_steps: int, *group: InstanceId) -> BatchPlan:
    """Master is the last of the group."""
    block = QueryBlock("r", range(4, 5), group[-1], Transfer.QUERY)
    return BatchPlan(
        ESPGroup(group), (block,), (KVSegment("r", range(4, 4 + num_steps), group[-1]),), num_steps
    )


def token(batch_id: int, step: int, token_id: int, reason: FinishReason | None = None) -> TokensProduced:
    return TokensProduced(1.0, batch_id, step, (ProducedToken("r", token_id, reason),))


def prefilled(*masters: InstanceId) -> ClusterState:
    """As `cluster`, with r's prompt striped over the masters, and its first token, 60."""
    state = cluster()
    commit(state, IterationPlan((prefill(*masters),)), 0.0)
    state.apply(token(1, 0, 60))
    state.apply(BatchFinished(1.0, 1, 1))
    return state


def commit(state: ClusterState, plan: IterationPlan, now: float) -> tuple[Instruction, ...]:
    return state.commit(plan, state.snapshot(now))


def used(state: ClusterState) -> list[int]:
    state.check()
    return [instance.kv_used for instance in state.snapshot(0.0).instances]


def test_a_batch_reports_its_group_the_tokens_and_reserves_their_slots() -> None:
    state, plan = cluster(), prefill(1, 0)
    given = RequestInput("r", PROMPT, 4, 0, Placement(), PARAMS)
    assert commit(state, IterationPlan((plan,)), 0.0) == (RunBatch(1, plan, (given,)),)
    assert used(state) == [2, 2, 0, 0]
    assert [i.batch_id for i in state.snapshot(0.0).instances] == [1, 1, None, None]


def test_a_chunk_before_the_last_samples_nothing() -> None:
    state = cluster()
    (run,) = commit(state, IterationPlan((prefill(2, chunk=range(3)),)), 0.0)
    assert isinstance(run, RunBatch)
    assert run.inputs == (RequestInput("r", PROMPT[:3], 4, 0, Placement(), None),)
    with pytest.raises(InvalidEventError, match="of r, which it does not sample"):
        state.apply(token(1, 0, 60))
    assert state.apply(BatchFinished(1.0, 1, 1)).instructions == ()
    (view,) = state.snapshot(1.0).running
    assert (view.num_computed_tokens, view.num_uncomputed_tokens) == (3, 1)
    assert not view.is_decoding


def test_a_lease_that_ends_early_gives_back_the_slots_of_steps_not_taken() -> None:
    state = prefilled(0, 1)
    plan = lease(5, 0, 1)
    commit(state, IterationPlan((plan,)), 1.0)
    assert used(state) == [2, 7, 0, 0]
    state.apply(token(2, 0, 61))
    end = IterationPlan(lease_ends=(LeaseEnd(2, 2),))
    assert commit(state, end, 1.0) == (StopLease(2, plan.group, 2),)
    state.apply(token(2, 1, 62))
    assert state.apply(BatchFinished(2.0, 2, 2)).instructions == ()
    assert used(state) == [2, 4, 0, 0]
    (view,) = state.snapshot(2.0).running
    assert (view.num_output_tokens, view.is_decoding) == (3, True)


def test_a_lease_that_goes_on_has_room_for_its_steps_and_gives_back_what_it_does_not_use() -> None:
    state = prefilled(0, 1)
    plan = lease(3, 0, 1)
    commit(state, IterationPlan((plan,)), 1.0)
    assert used(state) == [2, 5, 0, 0]
    extension = IterationPlan(lease_extensions=(LeaseExtension(2, 6),))
    assert commit(state, extension, 1.0) == (ExtendLease(2, plan.group, 6),)
    assert used(state) == [2, 8, 0, 0]
    for step in range(4):
        state.apply(token(2, step, 61 + step))
    end = IterationPlan(lease_ends=(LeaseEnd(2, 5),))
    assert commit(state, end, 1.0) == (StopLease(2, plan.group, 5),)
    state.apply(token(2, 4, 65))
    assert state.apply(BatchFinished(2.0, 2, 5)).instructions == ()
    assert used(state) == [2, 7, 0, 0]
    (view,) = state.snapshot(2.0).running
    assert (view.num_output_tokens, view.is_decoding) == (6, True)


def test_a_lease_whose_group_heard_too_late_ends_as_it_was_to() -> None:
    state = prefilled(0)
    commit(state, IterationPlan((lease(3, 0),)), 1.0)
    state.apply(token(2, 0, 61))
    commit(state, IterationPlan(lease_extensions=(LeaseExtension(2, 7),)), 1.0)
    assert used(state) == [11, 0, 0, 0]
    state.apply(token(2, 1, 62))
    state.apply(token(2, 2, 63))
    assert state.apply(BatchFinished(2.0, 2, 3)).instructions == ()
    assert used(state) == [7, 0, 0, 0]


def test_after_an_abort_no_lease_goes_on_for_its_workers_know_of_none() -> None:
    for num_steps in (2, 3, 5):
        state = prefilled(0)
        commit(state, IterationPlan((lease(num_steps, 0),)), 1.0)
        state.apply(RequestAborted(1.5, "r"))
        with pytest.raises(InvalidPlanError, match="no lease that can be extended"):
            commit(state, IterationPlan(lease_extensions=(LeaseExtension(2, 7),)), 1.5)


def test_the_first_tokens_of_the_last_steps_of_a_lease_call_for_a_plan() -> None:
    state = cluster()
    commit(state, IterationPlan((prefill(0),)), 0.0)
    assert not state.apply(token(1, 0, 60)).needs_plan  # its batch has one step
    assert state.apply(BatchFinished(1.0, 1, 1)).needs_plan
    commit(state, IterationPlan((lease(5, 0),)), 1.0)
    calls = []
    for step, reason in enumerate((None, None, None, FinishReason.STOP)):
        calls.append(state.apply(token(2, step, 61, reason)).needs_plan)
    assert calls == [True, False, False, True]  # of a short lease at once


def test_a_lease_reports_when_its_present_step_began() -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan((lease(5, 0, 1),)), 0.5)
    (before,) = state.snapshot(0.5).batches
    event = token(2, 0, 61)
    state.apply(event)
    (after,) = state.snapshot(event.time).batches
    assert (before.stepped_at, after.stepped_at) == (0.5, event.time)
    assert (after.started_at, after.num_steps_taken) == (0.5, 1)


def test_a_request_that_ends_frees_its_kv_when_its_batch_is_done() -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan((lease(5, 0, 1, 2),)), 1.0)
    assert state.apply(token(2, 0, 61, FinishReason.STOP)).instructions == ()
    assert state.apply(RequestAborted(2.0, "r")).instructions == ()  # its client left just then
    assert state.apply(BatchFinished(2.0, 2, 1)).instructions == (ReleaseKV("r", (0, 1, 2)),)
    assert used(state) == [0, 0, 0, 0]
    assert state.snapshot(2.0).request == {}


def test_a_request_that_fails_is_gone_with_its_kv() -> None:
    state = prefilled(0, 1)
    assert commit(state, IterationPlan(failures=(Failure("r", "why"),)), 1.0) == (ReleaseKV("r", (0, 1)),)
    assert used(state) == [0, 0, 0, 0]
    snapshot = state.snapshot(1.0)
    assert (snapshot.request, snapshot.stats.num_failed, snapshot.stats.num_ended) == ({}, 1, 1)
    state.check()


def test_a_request_in_a_batch_does_not_fail() -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan((lease(5, 0, 1),)), 1.0)
    with pytest.raises(InvalidPlanError, match="request r is in batch 2"):
        commit(state, IterationPlan(failures=(Failure("r", "why"),)), 1.0)


def test_an_abort_ends_the_lease_at_the_next_step() -> None:
    state = prefilled(0)
    commit(state, IterationPlan((lease(5, 0),)), 1.0)
    state.apply(token(2, 0, 61))
    assert state.apply(RequestAborted(1.5, "r")).instructions == (StopLease(2, ESPGroup((0,)), 2),)
    assert state.apply(RequestAborted(1.6, "r")).instructions == ()
    assert state.apply(token(2, 1, 62)).instructions == ()
    assert state.apply(BatchFinished(2.0, 2, 2)).instructions == (ReleaseKV("r", (0,)),)


def test_an_abort_of_a_waiting_request_ends_it_at_once_and_of_an_unknown_one_is_ignored() -> None:
    state = cluster()
    assert state.apply(RequestAborted(1.0, "r")).instructions == ()
    assert state.apply(RequestAborted(1.0, "r")).instructions == ()
    assert state.snapshot(1.0).stats.num_ended == 1


def test_a_migration_commits_by_releasing_its_source_and_rolls_back_by_its_destination() -> None:
    state = prefilled(0, 1)
    segment = KVSegment("r", range(0, 4, 2), 0)
    for migration_id, is_committed in ((2, False), (3, True)):
        migration = KVMigration(segment, 2)
        assert commit(state, IterationPlan(migrations=(migration,)), 1.0) == (
            MoveKV(migration_id, migration),
        )
        assert used(state) == [2, 2, 2, 0]
        stale = 0 if is_committed else 2
        assert state.apply(MigrationFinished(2.0, migration_id, is_committed)).instructions == (
            ReleaseKV("r", (stale,), segment.positions),
        )
    assert used(state) == [0, 2, 2, 0]


def test_a_preempted_request_waits_and_is_computed_again_with_what_it_produced() -> None:
    state = prefilled(0, 1)
    assert commit(state, IterationPlan(preemptions=(Preemption("r"),)), 1.0) == (ReleaseKV("r", (0, 1)),)
    (view,) = state.snapshot(1.0).waiting
    assert (view.num_uncomputed_tokens, view.num_output_tokens) == (5, 1)
    (run,) = commit(state, IterationPlan((prefill(3, chunk=range(5)),)), 1.0)
    assert isinstance(run, RunBatch)
    assert run.inputs[0].token_ids == (*PROMPT, 60)


def test_a_view_reports_whom_a_request_is_for_and_when_its_first_token_came() -> None:
    state = ClusterState((ElasticInstance(0, 1, InstanceKind.FULL, 20),))
    state.apply(RequestArrived(0.0, Request("r", PROMPT, PARAMS, arrival_time=0.0, user="ann")))
    (view,) = state.snapshot(0.0).waiting
    assert (view.user, view.first_token_time) == ("ann", None)
    commit(state, IterationPlan((prefill(0),)), 0.0)
    state.apply(TokensProduced(3.0, 1, 0, (ProducedToken("r", 60),)))
    state.apply(BatchFinished(4.0, 1, 1))
    commit(state, IterationPlan((lease(1, 0),)), 4.0)
    state.apply(TokensProduced(5.0, 2, 0, (ProducedToken("r", 61),)))
    state.apply(BatchFinished(6.0, 2, 1))
    commit(state, IterationPlan(preemptions=(Preemption("r"),)), 6.0)
    (view,) = state.snapshot(6.0).waiting
    assert (view.num_output_tokens, view.first_token_time) == (2, 3.0)


def test_a_prompt_that_is_a_range_stays_one_until_outputs_join_it() -> None:
    state = ClusterState((ElasticInstance(0, 1, InstanceKind.FULL, 20),))
    state.apply(RequestArrived(0.0, Request("r", range(50, 54), PARAMS, arrival_time=0.0)))
    (run,) = commit(state, IterationPlan((prefill(0, chunk=range(3)),)), 0.0)
    assert isinstance(run, RunBatch)
    assert run.inputs[0].token_ids == range(50, 53)
    state.apply(BatchFinished(1.0, 1, 1))
    commit(state, IterationPlan((prefill(0, chunk=range(3, 4)),)), 1.0)
    state.apply(token(2, 0, 60))
    state.apply(BatchFinished(2.0, 2, 1))
    commit(state, IterationPlan(preemptions=(Preemption("r"),)), 2.0)
    (run,) = commit(state, IterationPlan((prefill(0, chunk=range(5)),)), 2.0)
    assert isinstance(run, RunBatch)
    assert run.inputs[0].token_ids == (50, 51, 52, 53, 60)


def test_when_an_instance_is_lost_its_peers_free_even_what_they_had_only_reserved() -> None:
    state = cluster()
    commit(state, IterationPlan((prefill(0, 1, 2),)), 0.0)
    assert state.apply(InstanceLost(1.0, 1)).instructions == tuple(
        ReleaseKV("r", (0, 2), range(i, 4, 3), is_void=True) for i in range(3)
    )
    assert used(state) == [0, 0, 0]
    assert [i.batch_id for i in state.snapshot(1.0).instances] == [None] * 3
    assert [view.request_id for view in state.snapshot(1.0).waiting] == ["r"]


def test_the_end_of_a_batch_hands_it_on_with_its_start_and_what_its_group_had_reserved() -> None:
    state = prefilled(0, 1)
    (batch,) = commit(state, IterationPlan((lease(4, 0, 1),)), 1.0)
    commit(state, IterationPlan(lease_extensions=(LeaseExtension(2, 7),)), 1.25)
    assert state.apply(BatchStarted(1.5, 2)).ended is None
    for step in range(6):
        assert state.apply(token(2, step, 61 + step)).ended is None
    ended = state.apply(BatchFinished(2.0, 2, 6)).ended
    assert ended is not None
    assert (ended.instruction, ended.kv_reserved) == (batch, ((0, 2), (1, 6)))
    assert (ended.running.started_at, ended.running.plan.num_steps) == (1.5, 7)


def test_a_loss_hands_on_every_batch_that_is_void_because_of_it() -> None:
    state = cluster()
    (batch,) = commit(state, IterationPlan((prefill(0, 1),)), 0.0)
    applied = state.apply(InstanceLost(1.0, 1))
    assert applied.ended is None
    assert [void.instruction for void in applied.voided] == [batch]
    assert not state.apply(InstanceLost(1.0, 0)).voided


def test_a_source_that_is_lost_in_a_migration_costs_the_destination_its_slots() -> None:
    state = prefilled(0)
    commit(state, IterationPlan(migrations=(KVMigration(KVSegment("r", range(4), 0), 1),)), 1.0)
    assert state.apply(InstanceLost(1.0, 0)).instructions == (ReleaseKV("r", (1,), range(4)),)
    assert used(state) == [0, 0, 0]


def test_slots_for_kv_that_was_to_arrive_from_a_void_batch_are_released_once() -> None:
    state = cluster()
    commit(state, IterationPlan((prefill(0, 1),)), 0.0)
    state.apply(BatchEndPredicted(0.5, 1, 1.0))
    commit(state, IterationPlan(migrations=(KVMigration(KVSegment("r", range(1), 0), 1),)), 0.5)
    assert state.apply(InstanceLost(1.0, 0)).instructions == (
        ReleaseKV("r", (1,), range(1)),
        ReleaseKV("r", (1,), range(2, 4, 2), is_void=True),
        ReleaseKV("r", (1,), range(1, 4, 2), is_void=True),
    )
    assert used(state) == [0, 0, 0]


def test_a_destination_that_is_lost_in_a_migration_costs_nothing() -> None:
    state = prefilled(0)
    commit(state, IterationPlan(migrations=(KVMigration(KVSegment("r", range(4), 0), 1),)), 1.0)
    assert state.apply(InstanceLost(1.0, 1)).instructions == ()
    assert used(state) == [4, 0, 0]
    (view,) = state.snapshot(1.0).running
    assert view.is_plannable


def test_a_migration_of_the_same_request_between_two_others_goes_on_after_a_loss() -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan(migrations=(KVMigration(KVSegment("r", range(1, 4, 2), 1), 2),)), 1.0)
    assert state.apply(InstanceLost(1.0, 0)).instructions == ()
    assert used(state) == [2, 2, 0]
    assert state.apply(MigrationFinished(2.0, 2, is_committed=True)).instructions == (
        ReleaseKV("r", (1,), range(1, 4, 2)),
    )
    assert used(state) == [0, 2, 0]
    (view,) = state.snapshot(2.0).running
    assert [*chain(*view.missing)] == [0, 2, 4]


def test_a_repair_computes_what_was_lost_and_goes_on_from_there() -> None:
    state = prefilled(0, 1)
    assert state.apply(InstanceLost(1.0, 1)).instructions == ()
    (view,) = state.snapshot(1.0).running
    assert [*chain(*view.missing)] == [1, 3, 4]
    assert not view.is_decoding
    (run,) = commit(state, IterationPlan((prefill(0, 2, chunk=range(1, 5, 2)),)), 1.0)
    assert isinstance(run, RunBatch)
    (given,) = run.inputs
    assert (given.first_position, given.token_ids, given.sampling_params) == (1, PROMPT[1:], None)
    state.apply(BatchFinished(2.0, 2, 1))
    stats = state.snapshot(2.0).stats
    assert (stats.num_computed_tokens, stats.num_recomputed_tokens) == (6, 2)
    (view,) = state.snapshot(2.0).running
    assert (view.missing, view.is_decoding) == ((range(4, 5),), True)


def test_evicted_positions_are_missing_and_a_repair_computes_just_these() -> None:
    state = prefilled(0, 1)
    evicted, moved = KVSegment("r", range(3, 4), 1), KVSegment("r", range(1, 2), 1)
    move = KVMigration(moved, 0)
    plan = IterationPlan(migrations=(move,), evictions=(Eviction(evicted),))
    assert commit(state, plan, 1.0) == (ReleaseKV("r", (1,), range(3, 4)), MoveKV(2, move))
    state.apply(MigrationFinished(1.0, 2, is_committed=True))
    assert used(state) == [3, 0, 0, 0]
    (view,) = state.snapshot(1.0).running
    assert [*chain(*view.missing)] == [3, 4]
    commit(state, IterationPlan((prefill(0, chunk=range(3, 4)),)), 1.0)
    state.apply(BatchFinished(2.0, 3, 1))
    stats = state.snapshot(2.0).stats
    assert (stats.num_computed_tokens, stats.num_recomputed_tokens, stats.num_preemptions) == (5, 1, 0)


def test_a_lease_that_loses_a_holder_keeps_the_tokens_that_it_has_made() -> None:
    state = prefilled(0)
    commit(state, IterationPlan((lease(5, 1),)), 1.0)
    for step in range(3):
        state.apply(token(2, step, 61 + step))
    instructions = state.apply(InstanceLost(2.0, 0)).instructions
    assert instructions == (ReleaseKV("r", (1,), range(7, 9), is_void=True),)
    assert used(state) == [3, 0, 0]
    (view,) = state.snapshot(2.0).running
    assert view.missing == (range(4), range(7, 8))
    assert state.snapshot(2.0).stats.num_computed_tokens == 7


def test_a_group_that_grows_is_a_scale_up() -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan((lease(1, 0, 1, 2),)), 1.0)
    stats = state.snapshot(1.0).stats
    assert (stats.num_scale_ups, stats.num_scale_downs, stats.num_hand_overs) == (1, 0, 0)
    assert stats.num_batches_by_dop == {2: 1, 3: 1}


@pytest.mark.parametrize(
    ("decoding", "counts"), [((0,), (0, 0, 1, 2)), ((2,), (0, 0, 1, 4)), ((1, 0), (0, 0, 0, 0))]
)
def test_decodes_that_read_kv_elsewhere_are_hand_overs_not_scale_downs(
    decoding: tuple[InstanceId, ...], counts: tuple[int, ...]
) -> None:
    state = prefilled(0, 1)
    commit(state, IterationPlan((lease(3, *decoding),)), 1.0)
    stats = state.snapshot(1.0).stats
    assert (
        stats.num_scale_ups,
        stats.num_scale_downs,
        stats.num_hand_overs,
        stats.num_served_tokens,
    ) == counts
    assert (stats.num_leases, stats.num_served_leases) == (1, counts[-1] > 0)


def test_a_group_that_shrinks_with_its_kv_retained_is_a_scale_down() -> None:
    state, first = cluster(), prefill(0, 1)
    kept = replace(first, writes=(KVSegment("r", range(4), 1),))
    commit(state, IterationPlan((kept,)), 0.0)
    state.apply(token(1, 0, 60))
    state.apply(BatchFinished(1.0, 1, 1))
    commit(state, IterationPlan((lease(3, 1),), program_sizes=(1, 3)), 1.0)
    stats = state.snapshot(1.0).stats
    assert (stats.num_scale_ups, stats.num_scale_downs, stats.num_hand_overs) == (0, 1, 0)
    assert (stats.num_retained_tokens, stats.num_served_leases) == (2, 0)
    assert (stats.num_program_calls, stats.num_program_calls_of_several) == (2, 1)


def test_kv_that_is_pushed_and_leases_of_several_masters_are_counted() -> None:
    state, first = cluster(), prefill(0)
    commit(state, IterationPlan((replace(first, writes=(KVSegment("r", range(4), 3),)),)), 0.0)
    assert state.snapshot(0.0).stats.num_pushed_tokens == 4
    assert state.apply(RequestArrived(0.0, Request("s", PROMPT, PARAMS, arrival_time=0.0))).needs_plan
    second = striped("s", range(4), (1,)).segments
    block = QueryBlock("s", range(4), 1, Transfer.KV)
    commit(state, IterationPlan((BatchPlan(ESPGroup((1,)), (block,), second),)), 0.0)
    for batch_id, owner_id in ((1, "r"), (2, "s")):
        state.apply(TokensProduced(1.0, batch_id, 0, (ProducedToken(owner_id, 60),)))
        state.apply(BatchFinished(1.0, batch_id, 1))
    blocks = tuple(
        QueryBlock(name, range(4, 5), master, Transfer.QUERY) for name, master in (("r", 3), ("s", 1))
    )
    writes = tuple(KVSegment(b.request_id, range(4, 6), b.master_id) for b in blocks)
    commit(state, IterationPlan((BatchPlan(ESPGroup((3, 1)), blocks, writes, 2),)), 1.0)
    stats = state.snapshot(1.0).stats
    assert (stats.num_leases, stats.num_group_leases, stats.num_multi_master_leases) == (1, 1, 1)
    assert stats.busy_seconds == 0.0, "no batch reported its start"


def test_the_time_of_a_batch_is_busy_from_its_start_to_its_end_or_its_loss() -> None:
    state = cluster()
    commit(state, IterationPlan((prefill(0, 1),)), 0.0)
    state.apply(BatchStarted(1.0, 1))
    state.apply(token(1, 0, 60))
    state.apply(BatchFinished(3.0, 1, 1))
    commit(state, IterationPlan((lease(3, 0, 1),)), 3.0)
    state.apply(BatchStarted(5.0, 2))
    state.apply(InstanceLost(9.0, 0))
    assert state.snapshot(20.0).stats.busy_seconds == 6.0


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (RequestArrived(1.0, Request("r", PROMPT, PARAMS, arrival_time=0.0)), "request r arrived twice"),
        (token(7, 0, 60), "batch 7 produced tokens, but is not running"),
        (BatchFinished(1.0, 7, 1), "batch 7 finished, but is not running"),
        (MigrationFinished(1.0, 7, True), "migration 7 finished, but is not running"),
        (InstanceLost(1.0, 7), "instance 7 is lost, but was not there"),
        (InstanceJoined(1.0, ElasticInstance(0, 1, InstanceKind.FULL, 9)), "instance 0 joined twice"),
        (InstanceJoined(1.0, ElasticInstance(7, 1, InstanceKind.FULL, 9, 3)), "7 joined with 3 tokens"),
        (token(2, 1, 61), "step 1, but step 0 of 3 is due"),
        (TokensProduced(1.0, 2, 0, (ProducedToken("s", 61),)), "of s, which it does not sample"),
        (BatchFinished(1.0, 2, 1), "after 1 steps, but produced 0 tokens of r"),
    ],
)
def test_an_event_that_cannot_have_happened_is_refused_and_changes_nothing(
    event: Event, message: str
) -> None:
    state = prefilled(0)
    commit(state, IterationPlan((lease(3, 0),)), 1.0)
    before = state.snapshot(1.0)
    with pytest.raises(InvalidEventError, match=message):
        state.apply(event)
    assert state.snapshot(1.0) == before
    state.check()


def test_a_request_may_not_go_on_past_its_last_token() -> None:
    state = ClusterState((ElasticInstance(0, 1, InstanceKind.FULL, 20),))
    state.apply(RequestArrived(0.0, Request("r", PROMPT, SamplingParams(max_tokens=1), arrival_time=0.0)))
    commit(state, IterationPlan((prefill(0),)), 0.0)
    with pytest.raises(InvalidEventError, match="request r goes on after 1 of at most 1 tokens"):
        state.apply(token(1, 0, 60))


def test_a_plan_made_before_an_event_or_another_plan_is_refused() -> None:
    state, plan = prefilled(0), IterationPlan((lease(3, 0),))
    before = state.snapshot(1.0)
    state.apply(RequestAborted(1.0, "s"))
    with pytest.raises(InvalidPlanError, match="for version 4 of the state, but it is at 5"):
        state.commit(plan, before)
    after = state.snapshot(1.0)
    state.commit(plan, after)
    with pytest.raises(InvalidPlanError, match="for version 5 of the state, but it is at 6"):
        state.commit(plan, after)


def test_a_refused_plan_changes_nothing() -> None:
    state = prefilled(0)
    before = state.snapshot(1.0)
    plan = IterationPlan((lease(3, 0),), preemptions=(Preemption("r"),))
    with pytest.raises(InvalidPlanError, match="r is planned 2 times"):
        commit(state, plan, 1.0)
    assert state.snapshot(1.0) == before
