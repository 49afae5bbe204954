"""Proactive migration: KV of a prompt goes to where it will decode, while its last chunk is computed.

An instance outside the group gets new KV pushed, layer by layer. One of the group keeps what the ring passes
on, and the group scales down to it (LoongServe, 4.1). KV of earlier chunks is copied under the last one. So
requests do not wait for moves.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from loong.core.cost.work import step_work
from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, KVMigration
from loong.core.request import RequestId, RequestView
from loong.scheduler.common.leases import decode_seconds
from loong.scheduler.common.striping import RequestPart, batch_of, next_positions, retained_part
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.homes import moved_to
from loong.scheduler.esp.placement import Coming, Placements
from loong.scheduler.tuning import LONG_LEASE_KV_SHARE

PUSHED = "its KV goes where it will decode while its last chunk is computed, which costs less than serving it"
CLEARED = "its KV leaves an instance that decodes, which would serve the rest of its prompt"
RETAINED = "its group scales down: the ring of its last chunk leaves its KV on the instance that will decode"


def push_ahead(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Let KV of prompts whose last chunk is planned go to the instances for decodes."""
    if not _is_proactive(draft):
        return draft
    room, pushed = _rooms(draft, decodes.instance_ids), list[tuple[RequestView, InstanceId]]()
    batches = list[BatchPlan]()
    for batch in draft.batches:
        chosen = list[tuple[RequestView, InstanceId]]()
        if set(decodes.instance_ids).isdisjoint(batch.group.instance_ids):
            chosen = list(_chosen(draft, decodes, batch, room))
        batches.append(_pushing(draft, batch, chosen) if chosen else batch)
        pushed += chosen
    return _moving(replace(draft, batches=tuple(batches)), pushed, PUSHED)


def retain(draft: PlanDraft) -> PlanDraft:
    """Let the ring of a step without decodes leave KV of last chunks on one instance each.

    Where there are decodes, these have their places, and no group scales down. Where KV is short it stays
    spread, so that any free slot serves any request.
    """
    if draft.decodes or len(draft.everywhere) == 1 or not (draft.variant.has_apart and _is_proactive(draft)):
        return draft
    room, retained = _rooms(draft, draft.everywhere), list[tuple[RequestView, InstanceId]]()
    batches = list[BatchPlan]()
    for batch in draft.batches:
        for view in _last(draft, batch) if batch.group.dop > 1 else ():
            own = Counter(batch.only_for((view.request_id,)).num_stored_tokens)
            keeper_id = max(own, key=(room + own).__getitem__)
            if view.num_final_tokens > LONG_LEASE_KV_SHARE * (room + own)[keeper_id]:
                continue
            if (retaining := _retaining(draft, batch, view, keeper_id)) is not None:
                batch = retaining
                room += own
                room[keeper_id] -= view.num_final_tokens
                retained.append((view, keeper_id))
        batches.append(batch)
    return _moving(replace(draft, batches=tuple(batches)), retained, RETAINED)


def clear_homes(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Let KV of prompts leave the instances for decodes while the next chunk is computed on others.

    So instances for prompts become instances for decodes, which chunks do not slow.
    """
    if not _is_proactive(draft):
        return draft
    migrations, cleared = list[KVMigration](), dict[RequestId, None]()
    for batch in draft.batches:
        if batch.num_steps > 1 or not set(decodes.instance_ids).isdisjoint(batch.group.instance_ids):
            continue
        room = _rooms(draft, batch.group.instance_ids)
        last_ids = {view.request_id for view in _last(draft, batch)}
        for view in map(draft.snapshot.request.__getitem__, batch.request_ids):
            if view.request_id in last_ids or view.num_output_tokens or not _is_own(view):
                continue
            for segment in view.placement.segments:
                instance_id = max(room, key=room.__getitem__)
                num_needed = len(segment.positions) + view.num_tokens_to_come
                if segment.instance_id in decodes.instance_ids and room[instance_id] >= num_needed:
                    room[instance_id] -= len(segment.positions)
                    migrations.append(KVMigration(segment, instance_id))
                    cleared[view.request_id] = None
    if not migrations:
        return draft
    reason = Decision(DecisionKind.MIGRATE, tuple(cleared), CLEARED)
    return replace(draft, migrations=(*draft.migrations, *migrations), decisions=(*draft.decisions, reason))


def _is_proactive(draft: PlanDraft) -> bool:
    return draft.variant.has_moves and draft.variant.has_proactive and draft.is_roomy


def _moving(draft: PlanDraft, moved: Sequence[tuple[RequestView, InstanceId]], why: str) -> PlanDraft:
    """Copy what these requests have to where their new KV goes."""
    if not moved:
        return draft
    migrations = [
        KVMigration(segment, instance_id)
        for view, instance_id in moved
        for segment in view.placement.segments
        if segment.instance_id != instance_id
    ]
    reason = Decision(DecisionKind.MIGRATE, tuple(view.request_id for view, _ in moved), why)
    return replace(draft, migrations=(*draft.migrations, *migrations), decisions=(*draft.decisions, reason))


def _rooms(draft: PlanDraft, instance_ids: Iterable[InstanceId]) -> Counter[InstanceId]:
    """Return the slots that a draft leaves free on each of these."""
    room = Counter({i: draft.snapshot.free[i] for i in instance_ids})
    for batch in draft.batches:
        room.subtract({i: n for i, n in batch.num_stored_tokens.items() if i in room})
    return room


def _last(draft: PlanDraft, batch: BatchPlan) -> list[RequestView]:
    """Return the prompts of a planned step of which it computes the rest, whose KV is theirs alone."""
    views = map(draft.snapshot.request.__getitem__, batch.request_ids if batch.num_steps == 1 else ())
    return [
        view
        for view in views
        if _is_own(view)
        and view.num_output_tokens == 0
        and view.max_tokens > 1
        and batch.num_written_tokens[view.request_id] == view.num_uncomputed_tokens
    ]


def _is_own(view: RequestView) -> bool:
    """Return whether all KV of a request is its alone, and may move."""
    return not (view.cached or view.borrowed or view.num_siblings or view.has_holes or view.has_ended)


def _computed(view: RequestView, batch: BatchPlan) -> RequestView:
    """Return a request as it is after its last chunk."""
    placement = view.placement.adding(batch.writes_of(view.request_id))
    return replace(view, placement=placement, num_output_tokens=1)


def _chosen(
    draft: PlanDraft, decodes: ServedDecodes, batch: BatchPlan, room: Counter[InstanceId]
) -> Iterator[tuple[RequestView, InstanceId]]:
    """Yield the prompts whose KV costs less where they will decode, if it goes ahead; take the room for it.

    It must not slow the chunk by more than a later move would cost the request and other chunks.
    """
    num_slowed, copying = len(draft.prompt_ids), draft.cost_model.copying_time
    for instance_id, views in _destinations(decodes, _last(draft, batch), room).items():
        coming = list[Coming]()
        for view in views:
            slowed = _slowed(batch, _pushing(draft, batch, [(view, instance_id)]))
            moving = _seconds_to_move(draft, view, batch, instance_id)
            if (1 + num_slowed) * slowed <= moving + num_slowed * copying(view.num_uncomputed_tokens):
                coming.append(Coming(_computed(view, batch), slowed + copying(view.placement.num_tokens)))
        moved = Placements(draft, decodes, instance_id, coming).moved if coming else ()
        moved_ids = {view.request_id for view in moved}
        for view in views:
            if view.request_id in moved_ids:
                room[instance_id] -= view.num_prompt_tokens
                yield view, instance_id


def _destinations(
    decodes: ServedDecodes, views: Iterable[RequestView], room: Counter[InstanceId]
) -> dict[InstanceId, list[RequestView]]:
    """Return where each prompt will decode: where least is read, of the instances with room for its KV."""
    found, left = defaultdict[InstanceId, list[RequestView]](list), room.copy()
    num_read = {
        instance_id: sum(view.placement.num_tokens for view in there)
        for instance_id, there in decodes.views_at.items()
    }
    for view in views:
        if able := [i for i in decodes.instance_ids if left[i] >= view.num_prompt_tokens]:
            instance_id = min(able, key=num_read.__getitem__)
            found[instance_id].append(view)
            num_read[instance_id] += view.num_prompt_tokens
            left[instance_id] -= view.num_prompt_tokens
    return found


def _pushing(
    draft: PlanDraft, batch: BatchPlan, chosen: Sequence[tuple[RequestView, InstanceId]]
) -> BatchPlan:
    """Return a step that pushes all new KV of these requests to an instance each."""
    pushed = [
        KVSegment(view.request_id, positions, instance_id)
        for view, instance_id in chosen
        for positions in next_positions(view, view.num_uncomputed_tokens)
    ]
    pushed_ids = {segment.owner_id for segment in pushed}
    kept = (segment for segment in batch.writes if segment.owner_id not in pushed_ids)
    return _timed(draft, replace(batch, writes=(*kept, *pushed)))


def _retaining(
    draft: PlanDraft, batch: BatchPlan, view: RequestView, keeper_id: InstanceId
) -> BatchPlan | None:
    """Return a step whose ring leaves a prompt's new KV on one instance.

    None if serving all its KV from where it would be costs less, or if it has KV outside the group.
    """
    if not set(batch.group.instance_ids).issuperset(view.placement.instance_ids):
        return None
    part = retained_part(view, view.num_uncomputed_tokens, batch.group, {keeper_id: view.num_final_tokens})
    others = batch.only_for(r for r in batch.request_ids if r != view.request_id)
    retaining = _timed(draft, batch_of(batch.group, (RequestPart(others.queries, others.writes), part)))
    model, computed, slowed = draft.cost_model, _computed(view, batch), _slowed(batch, retaining)
    if slowed > _seconds_to_move(draft, view, batch, keeper_id):
        return None
    slowed += model.copying_time(view.placement.num_tokens)
    served = decode_seconds((keeper_id,), (computed.placement,), model, are_holders_idle=True)
    local = decode_seconds((keeper_id,), (moved_to(keeper_id, computed),), model)
    saved = (served - local) * computed.num_remaining_tokens
    return retaining if len(batch.request_ids) * slowed < saved else None


def _seconds_to_move(draft: PlanDraft, view: RequestView, batch: BatchPlan, instance_id: InstanceId) -> float:
    """Return the seconds that a later move of a request's new KV would take."""
    source_id = next(i for i in batch.group.instance_ids if i != instance_id)
    return draft.cost_model.migration_time(view.num_uncomputed_tokens, source_id, instance_id)


def _timed(draft: PlanDraft, batch: BatchPlan) -> BatchPlan:
    """Return a batch with its predicted time."""
    placements = {r: draft.snapshot.request[r].placement for r in batch.request_ids}
    return replace(batch, predicted_time=draft.cost_model.step_time(step_work(batch, placements)))


def _slowed(batch: BatchPlan, other: BatchPlan) -> float:
    """Return the seconds that another way to compute a batch takes longer."""
    return (other.predicted_time or 0.0) - (batch.predicted_time or 0.0)
