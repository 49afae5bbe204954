"""The line of a plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from loong.core.decision import Decision
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RoomLent,
    RoomReturned,
    TokensProduced,
)
from loong.core.instance import ElasticInstance
from loong.core.instructions import Instruction, MoveKV, RequestInput, RunBatch
from loong.core.placement import KVSegment, tokens_by_instance
from loong.core.plan import BatchPlan, Eviction, IterationPlan, Preemption
from loong.core.positions import num_below
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.lines import (
    Cause,
    Chunk,
    ConsideredAlternative,
    Decode,
    EndedLease,
    Evicted,
    ExtendedLease,
    InstanceState,
    LoggedBatch,
    Migration,
    PlannedLine,
    Preempted,
    Reason,
    TokensByInstance,
)


def planned_line(
    events: Iterable[Event], snapshot: Snapshot, plan: IterationPlan, instructions: Sequence[Instruction]
) -> PlannedLine | None:
    """Return the line of a plan made on `events`, or None for an empty plan without reasons."""
    if plan == IterationPlan(program_sizes=plan.program_sizes):
        return None
    cached = {b.request_id: dict(tokens_by_instance(b.segments)) for b in plan.effective_borrowings}
    return PlannedLine(
        time=snapshot.now,
        causes=tuple(map(_cause, events)),
        instances=instance_states(snapshot.instances),
        batches=tuple(_batch(run, cached) for run in instructions if isinstance(run, RunBatch)),
        migrations=tuple(_migration(m) for m in instructions if isinstance(m, MoveKV)),
        preempted=tuple(_preempted(preemption, snapshot) for preemption in plan.preemptions),
        evicted=tuple(_evicted(plan.evictions, snapshot)),
        ended_leases=tuple(EndedLease(end.batch_id, end.step) for end in plan.lease_ends),
        extended_leases=tuple(ExtendedLease(e.batch_id, e.num_steps) for e in plan.lease_extensions),
        reasons=tuple(map(_reason, plan.decisions)),
    )


def instance_states(instances: Iterable[ElasticInstance]) -> tuple[InstanceState, ...]:
    """Return instances in the form of a line."""
    return tuple(
        InstanceState(i.instance_id, i.kv_used, i.kv_capacity, i.kind, i.batch_id, i.is_draining)
        for i in instances
    )


def _cause(event: Event) -> Cause:
    match event:
        case RequestArrived():
            return Cause("request_arrived", request_id=event.request.request_id)
        case RequestAborted():
            return Cause("request_aborted", request_id=event.request_id, reason=event.reason)
        case TokensProduced():
            has_ended = any(token.finish_reason for token in event.tokens)
            return Cause("tokens_produced" if has_ended else "lease_ending", batch_id=event.batch_id)
        case BatchStarted():
            return Cause("batch_started", batch_id=event.batch_id)
        case BatchEndPredicted():
            return Cause("batch_end_predicted", batch_id=event.batch_id)
        case BatchFinished():
            return Cause("batch_finished", batch_id=event.batch_id)
        case MigrationFinished():
            return Cause("migration_finished", migration_id=event.migration_id)
        case InstanceLost():
            return Cause("instance_lost", instance_id=event.instance_id)
        case InstanceJoined():
            return Cause("instance_joined", instance_id=event.instance.instance_id)
        case InstanceDraining():
            return Cause("instance_draining", instance_id=event.instance_id)
        case InstanceLeft():
            return Cause("instance_left", instance_id=event.instance_id)
        case RoomLent():
            return Cause("instance_lent", instance_id=event.instance_id)
        case RoomReturned():
            return Cause("instance_returned", instance_id=event.instance_id)
        case PrefixCacheReset():
            return Cause("prefix_cache_reset")
        case _:
            assert_never(event)


def _batch(run: RunBatch, cached: Mapping[RequestId, TokensByInstance]) -> LoggedBatch:
    plan = run.plan
    return LoggedBatch(
        run.batch_id,
        plan.group.instance_ids,
        plan.group.dop,
        chunks=tuple(
            _chunk(plan, given, begins=given.request_id in cached)
            for given in run.inputs
            if not given.is_decoding
        ),
        decodes=tuple(_decode(plan, given) for given in run.inputs if given.is_decoding),
        num_steps=plan.num_steps,
        predicted_seconds=plan.predicted_time,
        holder_ids=run.holder_ids,
        cached={request_id: cached[request_id] for request_id in plan.request_ids if request_id in cached},
    )


def _chunk(plan: BatchPlan, given: RequestInput, *, begins: bool) -> Chunk:
    computed_on: TokensByInstance = {}
    kept_on: TokensByInstance = {}
    blocks = plan.blocks_of(given.request_id)
    for block in blocks:
        computed_on[block.master_id] = computed_on.get(block.master_id, 0) + len(block.positions)
    for segment in plan.writes_of(given.request_id):
        kept_on[segment.instance_id] = kept_on.get(segment.instance_id, 0) + len(segment.positions)
    return Chunk(
        given.request_id,
        first_position=given.first_position,
        num_tokens=sum(computed_on.values()),
        computed_on=computed_on,
        kept_on=kept_on,
        num_output_tokens=given.num_output_tokens,
        num_repaired=0 if begins else num_below((block.positions for block in blocks), given.placement.stop),
    )


def _decode(plan: BatchPlan, given: RequestInput) -> Decode:
    (block,) = plan.blocks_of(given.request_id)
    return Decode(given.request_id, block.positions.start, block.master_id)


def _migration(instruction: MoveKV) -> Migration:
    segment = instruction.migration.segment
    return Migration(
        instruction.migration_id,
        segment.owner_id,
        num_tokens=len(segment.positions),
        source_id=segment.instance_id,
        destination_id=instruction.migration.destination_id,
        during_batch_id=instruction.during_batch_id,
        keeps_source=instruction.migration.keeps_source,
    )


def _preempted(preemption: Preemption, snapshot: Snapshot) -> Preempted:
    placement = snapshot.request[preemption.request_id].placement
    return Preempted(preemption.request_id, dict(placement.tokens_by_instance()), preemption.reason)


def _evicted(evictions: Iterable[Eviction], snapshot: Snapshot) -> Iterator[Evicted]:
    """Yield the evictions of each request together; those of other owners touch none."""
    segments: dict[RequestId, list[KVSegment]] = {}
    for eviction in evictions:
        if eviction.segment.owner_id not in snapshot.request:
            continue
        segments.setdefault(eviction.segment.owner_id, []).append(eviction.segment)
    for request_id, own in segments.items():
        kv = tokens_by_instance(own)
        yield Evicted(request_id, dict(kv), snapshot.request[request_id].num_computed_tokens - kv.total())


def _reason(decision: Decision) -> Reason:
    weighed = tuple(
        ConsideredAlternative(alternative.what, alternative.cost) for alternative in decision.alternatives
    )
    return Reason(decision.kind, decision.request_ids, decision.chosen, weighed)
