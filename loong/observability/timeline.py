"""An observer of the loop that keeps the last batches, migrations, requests and changes of instances."""

from collections.abc import Sequence, Set
from dataclasses import replace

from loong.core.applied import Applied, CommittedBatch
from loong.core.cluster_history import (
    BatchSlice,
    ChangeKind,
    ClusterHistory,
    InstanceChange,
    KVLevel,
    KVMove,
)
from loong.core.cost.work import phase_with
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RoomLent,
    RoomReturned,
)
from loong.core.instructions import Instruction, MoveKV, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.observability.latest import Latest
from loong.observability.recomputed import Recomputed
from loong.observability.request_spans import RequestSpans

MAX_BATCH_BYTES = 2**25  # of the kept batches
MAX_MOVE_BYTES = 2**22
MAX_CHANGE_BYTES = 2**18
MAX_LEVEL_BYTES = 2**20
_SLICE_BYTES = 512  # of a slice without requests and instances
_INSTANCE_BYTES = 192  # of a slice, for each instance
_ID_BYTES = 64  # of a request's id, apart from its letters
_MOVE_BYTES = 320
_CHANGE_BYTES = 256  # of a change, apart from its reason
_LEVEL_BYTES = 128


class Timeline:
    """The last batches, migrations, requests and changes of instances."""

    def __init__(
        self,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        max_move_bytes: int = MAX_MOVE_BYTES,
        max_change_bytes: int = MAX_CHANGE_BYTES,
    ) -> None:
        self._batches = Latest(max_batch_bytes, _size_of_slice)
        self._moves = Latest(max_move_bytes, _size_of_move)
        self._changes = Latest(max_change_bytes, _size_of_change)
        self._levels = Latest[KVLevel](MAX_LEVEL_BYTES, lambda _: _LEVEL_BYTES)
        self._kv_used: dict[InstanceId, int] = {}  # of instances when last idle
        self._requests = RequestSpans()
        self._recomputed = Recomputed(self._requests.is_live)
        self._ended: list[BatchSlice] = []  # since the last plan, with the reserved KV as the used one
        self._moving: dict[int, tuple[MoveKV, float]] = {}
        self._kv_capacity: dict[InstanceId, int] = {}

    def history(self) -> ClusterHistory:
        """Return the history so far."""
        batches = (*self._batches, *self._ended)
        return ClusterHistory(
            batches,
            tuple(self._moves),
            dict(self._kv_capacity),
            self._requests.spans(),
            tuple(self._changes),
            tuple(self._levels),
        )

    def on_event(self, event: Event, applied: Applied, /) -> None:
        """Record an end or a change. Forget migrations of a lost instance: they never end."""
        self._requests.on_event(event)
        if applied.ended is not None:
            self._ended.append(self._slice(applied.ended, event.time))
        elif isinstance(event, MigrationFinished) and event.migration_id in self._moving:
            self._moves.append(_move(*self._moving.pop(event.migration_id), event))
        elif isinstance(event, RequestAborted):
            self._recomputed.forget(event.request_id)
        elif (change := _change(event, applied)) is not None:
            self._changes.append(change)
        if isinstance(event, InstanceLost):
            lost = event.instance_id
            self._moving = {
                migration_id: (instruction, started_at)
                for migration_id, (instruction, started_at) in self._moving.items()
                if lost
                not in (instruction.migration.segment.instance_id, instruction.migration.destination_id)
            }

    def on_plan(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Record the KV after what has just ended, and the batches and migrations that start."""
        self._see_pools(snapshot, {event.batch_id for event in events if isinstance(event, BatchFinished)})
        self._requests.failed(snapshot.now, (failure.request_id for failure in plan.failures))
        for failure in plan.failures:
            self._recomputed.forget(failure.request_id)
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                instances = (snapshot.instance[i] for i in instruction.plan.group.instance_ids)
                self._kv_capacity.update((i.instance_id, i.kv_capacity) for i in instances)
            elif isinstance(instruction, MoveKV):
                self._moving[instruction.migration_id] = (instruction, snapshot.now)

    def _see_pools(self, snapshot: Snapshot, now_ended: Set[int]) -> None:
        """Record the KV of the groups of ended batches, and other changes of idle instances."""
        shown = set[InstanceId]()
        for ended in self._ended:
            is_seen = ended.batch_id in now_ended
            shown.update(ended.group.instance_ids if is_seen else ())
            self._batches.append(_with_pools_of(snapshot, ended) if is_seen else ended)
        self._ended.clear()
        for instance in snapshot.instances:
            instance_id, num_tokens = instance.instance_id, instance.kv_used
            if not instance.is_idle or instance_id in snapshot.predicted_ends:
                continue  # the end of its batch will show it
            if self._kv_used.get(instance_id, 0) != num_tokens and instance_id not in shown:
                self._levels.append(KVLevel(instance_id, snapshot.now, num_tokens))
            self._kv_used[instance_id] = num_tokens

    def _slice(self, ended: CommittedBatch, ended_at: float) -> BatchSlice:
        batch, reserved = ended.instruction, ended.kv_reserved
        prefilled = [given for given in batch.inputs if not given.is_decoding]
        return BatchSlice(
            batch.batch_id,
            batch.plan.group,
            phase_with(bool(prefilled) or not batch.inputs, len(prefilled) < len(batch.inputs)),
            ended.running.started_at,
            ended_at,
            batch.plan.request_ids,
            reserved,
            reserved,
            sum(len(given.token_ids) for given in prefilled),
            max((given.num_prompt_tokens for given in prefilled), default=0),
            ended.running.holder_ids,
            self._recomputed.count(batch, prefilled),
        )


def _size_of_slice(piece: BatchSlice) -> int:
    """Return the bytes of a slice, as if no other slice shared its ids."""
    num_ids, num_letters = len(piece.request_ids), sum(map(len, piece.request_ids))
    num_instances = piece.group.dop + len(piece.holder_ids)
    return _SLICE_BYTES + _INSTANCE_BYTES * num_instances + _ID_BYTES * num_ids + num_letters


def _size_of_move(move: KVMove) -> int:
    return _MOVE_BYTES + len(move.request_id)


def _size_of_change(change: InstanceChange) -> int:
    return _CHANGE_BYTES + len(change.reason)


def _change(event: Event, applied: Applied) -> InstanceChange | None:
    match event:
        case InstanceLost():
            return InstanceChange(event.instance_id, ChangeKind.LOST, event.time, event.reason)
        case InstanceJoined():
            return InstanceChange(event.instance.instance_id, ChangeKind.JOINED, event.time, event.reason)
        case InstanceDraining():
            return InstanceChange(event.instance_id, ChangeKind.DRAINING, event.time, event.reason)
        case RoomLent() if applied.instructions:  # else it was refused
            return InstanceChange(event.instance_id, ChangeKind.LENT, event.time, event.reason)
        case RoomReturned() if applied.instructions:
            return InstanceChange(event.instance_id, ChangeKind.RETURNED, event.time, event.reason)
        case InstanceLeft():
            return InstanceChange(event.instance_id, ChangeKind.LEFT, event.time)
        case _:
            return None


def _with_pools_of(snapshot: Snapshot, ended: BatchSlice) -> BatchSlice:
    used = tuple((i, snapshot.instance[i].kv_used) for i, _ in ended.kv_used if i in snapshot.instance)
    return replace(ended, kv_used=used)


def _move(instruction: MoveKV, started_at: float, event: MigrationFinished) -> KVMove:
    segment = instruction.migration.segment
    return KVMove(
        instruction.migration_id,
        segment.owner_id,
        segment.instance_id,
        instruction.migration.destination_id,
        len(segment.positions),
        started_at,
        event.time,
        event.is_committed,
        instruction.migration.keeps_source,
    )
