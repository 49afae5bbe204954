"""The rules of batches: their groups, requests, positions, leases, stored KV and holders."""

from collections import Counter
from collections.abc import Sequence

from loong.core.errors import InvalidPlanError
from loong.core.instance import MAX_SERVED_LISTS, MAX_SERVED_TOKENS, ElasticInstance, InstanceKind, Service
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import intersection, is_partition, is_within
from loong.core.request import RequestView
from loong.core.rules.case import Case, Part
from loong.core.snapshot import Snapshot


def check_ranges(case: Case) -> None:
    """Check that each range of positions is not empty, not below 0, and in ascending order."""
    named_ranges: list[QueryBlock | KVSegment] = []
    for batch in case.plan.batches:
        named_ranges += (*batch.queries, *batch.writes)
    named_ranges += (migration.segment for migration in case.plan.migrations)
    named_ranges += (eviction.segment for eviction in case.plan.evictions)
    for named in named_ranges:
        positions = named.positions
        if not positions or positions.step < 1 or positions.start < 0:
            raise InvalidPlanError(f"{named} has positions {positions}: none, descending or below 0")


def check_groups_are_idle(case: Case) -> None:
    """Check that an instance is a member of at most one batch, and one without weights of none."""
    taken: set[InstanceId] = set()
    for batch in case.plan.batches:
        for instance_id in batch.group.instance_ids:
            instance = case.snapshot.instance.get(instance_id)
            if instance is None:
                raise InvalidPlanError(f"a batch names instance {instance_id}, which does not exist")
            if instance.kind is InstanceKind.HOST:
                raise InvalidPlanError(f"instance {instance_id} is a host tier and runs no batch")
            if instance.kind is InstanceKind.ATTENTION:
                raise InvalidPlanError(f"instance {instance_id} has no weights and runs no batch")
            if instance.is_draining:
                raise InvalidPlanError(f"instance {instance_id} is draining and takes no batch")
            if not instance.is_idle:
                raise InvalidPlanError(f"instance {instance_id} is running batch {instance.batch_id}")
            if instance_id in taken:
                raise InvalidPlanError(f"instance {instance_id} is given two batches")
            taken.add(instance_id)


def check_tp_sizes(case: Case) -> None:
    """Check that KV meets and moves only between instances of equal `tp_size`, over which it is cut.

    A host tier takes KV of any cut.
    """
    together = [batch.group.instance_ids for batch in case.plan.batches]
    together += [(m.segment.instance_id, m.destination_id) for m in case.plan.migrations]
    for instance_ids in together:
        instances = [case.snapshot.instance[i] for i in instance_ids if i in case.snapshot.instance]
        sizes = {i.tp_size for i in instances if i.kind is not InstanceKind.HOST}
        if len(sizes) > 1:
            raise InvalidPlanError(
                f"instances {instance_ids} have tp sizes {sorted(sizes)}; they must be equal"
            )


def check_requests_are_at_rest(case: Case) -> None:
    """Check that a request has at most one of these: a batch, migrations and evictions, a preemption, or a
    failure.

    KV that was computed before a batch, running or planned, may be copied meanwhile. It is at its destination
    from the next boundary of the request on.
    """
    owner_ids = case.snapshot.owners.keys()
    migrating_ids = {migration.segment.owner_id for migration in case.plan.migrations} - owner_ids
    evicted_ids = {eviction.segment.owner_id for eviction in case.plan.evictions} - owner_ids
    views = [part.view for _, parts in case.parts for part in parts]
    begun_ids = {view.request_id for view in views}
    other_ids = [*(migrating_ids - begun_ids | evicted_ids)]
    other_ids += [preemption.request_id for preemption in case.plan.preemptions]
    other_ids += [failure.request_id for failure in case.plan.failures]
    views += map(case.view, other_ids)
    copied_ids = migrating_ids - evicted_ids - case.snapshot.ending_ids
    for view in views:
        if not (view.is_plannable or (view.request_id in copied_ids and view.is_copyable)):
            raise InvalidPlanError(
                f"request {view.request_id} is in batch {view.batch_id}, migrating or over"
            )
    planned_ids = [view.request_id for view in views]
    if len(set(planned_ids)) < len(planned_ids):
        request_id, count = Counter(planned_ids).most_common(1)[0]
        raise InvalidPlanError(f"request {request_id} is planned {count} times at once")


def check_queries(case: Case) -> None:
    """Check that each request's queries are its first missing positions, each once, at valid masters.

    So no position is computed again, and none before all earlier ones.
    """
    for batch, parts in case.parts:
        if not batch.queries:
            raise InvalidPlanError(f"the batch of group {batch.group.instance_ids} has no queries")
        for part in parts:
            _check_positions(part)
            if len(part.blocks) > 1:
                _check_blocks(part)
        _check_masters(batch)


def _check_positions(part: Part) -> None:
    view, num_tokens = part.view, part.num_tokens
    if not 0 < num_tokens <= view.num_uncomputed_tokens:
        raise InvalidPlanError(
            f"request {view.request_id} is to compute {num_tokens} tokens, "
            f"but {view.num_uncomputed_tokens} are uncomputed"
        )
    for block in part.blocks if view.has_holes else ():
        for segment in view.placement.segments:
            if again := intersection(block.positions, segment.positions):
                raise InvalidPlanError(
                    f"request {view.request_id} is to compute positions {_positions_text(again)} again, "
                    f"which are on instance {segment.instance_id}"
                )
    _check_each_once("queries", view, part.blocks, part.positions)


def _check_each_once(
    name: str, view: RequestView, named: Sequence[QueryBlock | KVSegment], whole: tuple[range, ...]
) -> None:
    """Raise `InvalidPlanError` unless these have all positions of `whole`, each once, and no others."""
    if len(named) == len(whole) == 1 and named[0].positions == whole[0]:
        return  # always so for a decode
    positions = [one.positions for one in named]
    if not is_partition(positions, *whole):
        due = " and ".join(map(_positions_text, whole))
        raise InvalidPlanError(
            f"the {name} of request {view.request_id} are not positions {due}, each once: {positions}"
        )


def _positions_text(positions: range) -> str:
    if len(positions) == 1:
        return str(positions[0])
    step = f" in steps of {positions.step}" if positions.step > 1 else ""
    return f"{positions[0]} to {positions[-1]}{step}"


def _check_blocks(part: Part) -> None:
    if len({block.transfer for block in part.blocks}) > 1:
        raise InvalidPlanError(f"request {part.view.request_id} moves both KV and queries in one batch")
    if len({block.master_id for block in part.blocks}) < len(part.blocks) and not part.view.has_holes:
        raise InvalidPlanError(f"request {part.view.request_id} has two blocks at one master")


def _check_masters(batch: BatchPlan) -> None:
    group = frozenset(batch.group.instance_ids)
    for master_id in {block.master_id for block in batch.queries}:
        if master_id not in group:
            raise InvalidPlanError(f"master {master_id} is not in group {batch.group.instance_ids}")


def check_leases(case: Case) -> None:
    """Check that only decode tokens whose queries travel are leased.

    A request that may take fewer steps than the lease leaves it early. Only a lease has micro-batches; they
    rotate if they are one more than its instances.
    """
    for batch, parts in case.parts:
        if batch.num_steps < 1:
            raise InvalidPlanError(f"a batch takes at least 1 step, not {batch.num_steps}")
        number = batch.num_micro_batches
        if not 1 <= number <= len(parts) or (number > 1 and batch.num_steps == 1):
            raise InvalidPlanError(
                f"a batch of {batch.num_steps} steps with {len(parts)} requests has {number} micro-batches; "
                "only a lease has several, at most one a request"
            )
        if batch.rotates and number != batch.group.dop + 1:
            raise InvalidPlanError(f"{number} micro-batches are to rotate over {batch.group.dop} instances")
        if batch.num_steps == 1:
            continue
        for part in parts:
            view, transfer = part.view, part.blocks[0].transfer
            if view.has_holes:
                lacked = " and ".join(map(_positions_text, view.placement.holes))
                raise InvalidPlanError(
                    f"request {view.request_id} is to take a lease of {batch.num_steps} steps, "
                    f"but lacks positions {lacked}"
                )
            if not view.is_decoding or transfer is not Transfer.QUERY:
                raise InvalidPlanError(
                    f"request {view.request_id} is to take a lease of {batch.num_steps} steps with "
                    f"{view.num_uncomputed_tokens} uncomputed tokens, moving {transfer.value}; "
                    "only the newest token, moving query, may"
                )


def check_writes(case: Case) -> None:
    """Check that every new token is stored once, and at its master unless its KV travels or is pushed.

    KV that one step makes may be pushed outside the group. A lease's KV stays, since its next step reads it.
    """
    for batch, parts in case.parts:
        for part in parts:
            _check_stored_once(batch, part)
            if part.blocks[0].transfer is Transfer.QUERY:
                _check_masters_store(batch, part)
        group = frozenset(batch.group.instance_ids)
        for segment in batch.writes:
            if segment.instance_id not in group and batch.num_steps > 1:
                raise InvalidPlanError(
                    f"instance {segment.instance_id} is to store KV of request {segment.owner_id}, "
                    f"but is not in group {batch.group.instance_ids} of the lease"
                )
        unknown = {segment.owner_id for segment in batch.writes} - set(batch.request_ids)
        if unknown:
            raise InvalidPlanError(f"the batch stores KV of {sorted(unknown)}, which it does not compute")


def _check_stored_once(batch: BatchPlan, part: Part) -> None:
    stored = part.positions
    if batch.num_steps > 1:
        first = stored[0].start
        stored = (range(first, first + min(batch.num_steps, part.view.num_remaining_tokens)),)
    _check_each_once("writes", part.view, part.writes, stored)


def _check_masters_store(batch: BatchPlan, part: Part) -> None:
    if len(part.writes) == len(part.blocks) == 1 and part.writes[0].instance_id == part.blocks[0].master_id:
        return  # as in every decode: each token is made and stored once on the same instance
    for segment in part.writes:
        if segment.instance_id not in batch.group.instance_ids:
            continue  # pushed
        made = [block.positions for block in part.blocks if block.master_id == segment.instance_id]
        if batch.num_steps > 1 and made:  # the block's one token, and those of the steps after it
            made = [range(made[0].start, segment.positions[-1] + 1)]
        if not is_within(segment.positions, made):
            raise InvalidPlanError(f"{segment} is stored where it is not made, though its KV does not travel")


def check_holders(case: Case) -> None:
    """Check that KV outside the group is on live instances that can serve it, of equal `tp_size`.

    Stored KV travels only between members, so a request with history outside the group moves its queries.
    The KV that a batch reads needs no rule of its own: it belongs to requests of the batch, and no plan may
    move or release it before the batch ends (`check_requests_are_at_rest`, `check_preemptions`,
    `check_evictions`).
    """
    num_served = case.snapshot.num_served_leases.copy()
    for batch, parts in case.parts:
        group = frozenset(batch.group.instance_ids)
        for part in parts:
            held_ids = set(part.view.placement.instance_ids) - group
            if held_ids and part.blocks[0].transfer is not Transfer.QUERY:
                raise InvalidPlanError(
                    f"request {part.view.request_id} has KV on instances {sorted(held_ids)}, outside group "
                    f"{batch.group.instance_ids}, and is to move its KV; only its queries can reach that"
                )
        holder_ids = batch.holder_ids([part.view.placement for part in parts])
        for holder_id in holder_ids:
            _check_serves(case.snapshot, batch, holder_id)
            holder = case.snapshot.instance[holder_id]
            if holder.serves is Service.OWN_HOST and batch.num_steps > 1:
                _check_served_lease(batch, holder, num_served[holder_id])
                _check_lists(case.snapshot, batch, parts)
        if batch.num_steps > 1:
            num_served.update(holder_ids)


def _check_serves(snapshot: Snapshot, batch: BatchPlan, holder_id: InstanceId) -> None:
    holder, tp_size = snapshot.instance[holder_id], snapshot.instance[batch.group.leader_id].tp_size
    where = f"the batch of group {batch.group.instance_ids} has KV on instance {holder_id}, outside it"
    if holder.kind is InstanceKind.HOST or holder.serves is Service.NONE:
        raise InvalidPlanError(f"{where}, which does not serve attention")
    members = [snapshot.instance[i] for i in batch.group.instance_ids]
    if other := [i.instance_id for i in members if i.is_on_gpu != holder.is_on_gpu]:
        raise InvalidPlanError(
            f"{where}, {_memory(holder)}, and members {other} {_memory(members[0])}: no step on GPUs can "
            "wait for processors, so such an instance only keeps KV, which is copied back before it is read"
        )
    if far := [i for i in batch.group.instance_ids if not holder.can_serve(snapshot.instance[i])]:
        raise InvalidPlanError(f"{where}, which serves only its own host; members {far} are on others")
    if holder.tp_size != tp_size:
        raise InvalidPlanError(f"{where}, with tp size {holder.tp_size}; those of the group have {tp_size}")


def _memory(instance: ElasticInstance) -> str:
    return f"with KV in memory of {'GPUs' if instance.is_on_gpu else 'the host'}"


def _check_served_lease(batch: BatchPlan, holder: ElasticInstance, num_served: int) -> None:
    where = f"the lease of group {batch.group.instance_ids}, which instance {holder.instance_id} serves,"
    if not holder.takes_lease(num_served):
        raise InvalidPlanError(
            f"{where} comes while that serves {num_served} others; {holder.max_served_leases} can be served"
        )
    most_tokens = max(Counter(block.master_id for block in batch.queries).values())
    if most_tokens > MAX_SERVED_TOKENS:
        raise InvalidPlanError(f"{where} has {most_tokens} tokens of a master; {MAX_SERVED_TOKENS} can be")


def _check_lists(snapshot: Snapshot, batch: BatchPlan, parts: Sequence[Part]) -> None:
    """Check that the lists of all slots that a served lease attends have room on each instance."""
    listed: Counter[InstanceId] = Counter()
    for part in parts:
        listed.update(part.view.placement.tokens_by_instance())
    for instance_id, num_tokens in batch.num_stored_tokens.items():
        listed[instance_id] += num_tokens
    for instance_id, num_tokens in listed.items():
        most = MAX_SERVED_LISTS * snapshot.instance[instance_id].kv_capacity
        if num_tokens > most:
            raise InvalidPlanError(
                f"the decode lease of group {batch.group.instance_ids}, which others serve, lists the KV of "
                f"{num_tokens} tokens on instance {instance_id}; {most} can be"
            )
