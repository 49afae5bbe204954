"""What ran when, and what KV moved: for people to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from loong.core.events import BatchFinished, BatchStarted, Event, InstanceLost, MigrationFinished
from loong.core.instance import ESPGroup
from loong.core.instructions import Instruction, MoveKV, RunBatch
from loong.core.latest import Latest
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.request_spans import RequestSpan, RequestSpans
from loong.core.snapshot import Snapshot

MAX_BATCH_BYTES = 2**25  # of the slices of batches that are kept
MAX_MOVE_BYTES = 2**22
_SLICE_BYTES = 512  # of a slice without requests and instances
_INSTANCE_BYTES = 192  # of what a slice says of an instance
_ID_BYTES = 64  # of a request's id, without its letters
_MOVE_BYTES = 320

TokensOf = tuple[tuple[InstanceId, int], ...]
"""Tokens in the pools of some instances."""


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A batch that ran. Times are the executor's.

    `kv_used` is of its group at its end, and `kv_reserved` at its beginning, with room for all that it may
    write. `num_prefill_tokens` and `longest_prompt` are of prompts of which it computes some; 0 without any.
    `holder_ids` are the instances outside its group that served it.
    """

    batch_id: int
    group: ESPGroup
    phase: str  # prefill, decode or mixed
    started_at: float
    ended_at: float
    request_ids: tuple[RequestId, ...]
    kv_used: TokensOf
    kv_reserved: TokensOf = ()
    num_prefill_tokens: int = 0
    longest_prompt: int = 0
    holder_ids: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class KVMove:
    """A migration that has ended; times are the executor's."""

    migration_id: int
    request_id: RequestId
    source_id: InstanceId
    destination_id: InstanceId
    num_tokens: int
    started_at: float
    ended_at: float
    is_committed: bool


@dataclass(frozen=True, slots=True)
class ClusterHistory:
    """The last batches and migrations, in the order in which they ended; and how many tokens pools hold.

    `requests` are the last ones, those that have ended first.
    """

    batches: tuple[BatchSlice, ...] = ()
    moves: tuple[KVMove, ...] = ()
    kv_capacity: Mapping[InstanceId, int] = field(default_factory=dict)
    requests: tuple[RequestSpan, ...] = ()

    @property
    def instance_ids(self) -> list[InstanceId]:
        """Every instance that ran a batch."""
        return sorted({instance_id for batch in self.batches for instance_id in batch.group.instance_ids})

    @property
    def end(self) -> float:
        """When the last batch ended; 0 if there is none."""
        return max((batch.ended_at for batch in self.batches), default=0.0)

    def on(self, instance_id: InstanceId) -> list[BatchSlice]:
        """Return what an instance ran, in order.

        A batch that other members of its group ended later ends where the next one begins here.
        """
        own = [batch for batch in self.batches if instance_id in batch.group.instance_ids]
        own.sort(key=lambda batch: (batch.started_at, batch.batch_id))
        starts = [*(batch.started_at for batch in own[1:]), inf]
        return [
            replace(batch, ended_at=min(batch.ended_at, start))
            for batch, start in zip(own, starts, strict=True)
        ]

    def after(self, time: float) -> "ClusterHistory":
        """What started after `time`, on a clock that is 0 at the first request or batch left."""
        batches = [batch for batch in self.batches if batch.started_at > time]
        requests = [span for span in self.requests if span.arrived_at > time]
        starts = (*(batch.started_at for batch in batches), *(span.arrived_at for span in requests))
        zero = min(starts, default=time)
        moves = [move for move in self.moves if move.started_at >= zero]
        return ClusterHistory(
            tuple(replace(b, started_at=b.started_at - zero, ended_at=b.ended_at - zero) for b in batches),
            tuple(replace(m, started_at=m.started_at - zero, ended_at=m.ended_at - zero) for m in moves),
            self.kv_capacity,
            tuple(span.moved_by(-zero) for span in requests),
        )


class Timeline:
    """An observer of the loop that keeps the last batches, migrations and requests."""

    def __init__(self, max_batch_bytes: int = MAX_BATCH_BYTES, max_move_bytes: int = MAX_MOVE_BYTES) -> None:
        self._batches = Latest(max_batch_bytes, _size_of_slice)
        self._moves = Latest(max_move_bytes, _size_of_move)
        self._requests = RequestSpans()
        self._running: dict[
            int, tuple[RunBatch, float, TokensOf]
        ] = {}  # and since when, or since they were told
        self._ended: list[BatchSlice] = []  # since the last plan, as if their pools held what was reserved
        self._moving: dict[int, tuple[MoveKV, float]] = {}
        self._kv_capacity: dict[InstanceId, int] = {}

    def history(self) -> ClusterHistory:
        """What has ended so far."""
        batches = (*self._batches, *self._ended)
        return ClusterHistory(batches, tuple(self._moves), dict(self._kv_capacity), self._requests.spans())

    def on_event(self, event: Event, /) -> None:
        """Keep what ended, and forget what a lost instance took part in: it never ends."""
        self._requests.on_event(event)
        if isinstance(event, BatchStarted) and event.batch_id in self._running:
            instruction, _, reserved = self._running[event.batch_id]
            self._running[event.batch_id] = instruction, event.time, reserved
        elif isinstance(event, BatchFinished) and event.batch_id in self._running:
            instruction, started_at, reserved = self._running.pop(event.batch_id)
            self._ended.append(_slice(instruction, started_at, reserved, event.time))
        elif isinstance(event, MigrationFinished) and event.migration_id in self._moving:
            self._moves.append(_move(*self._moving.pop(event.migration_id), event))
        elif isinstance(event, InstanceLost):
            lost = event.instance_id
            self._running = {
                batch_id: running
                for batch_id, running in self._running.items()
                if lost not in running[0].participant_ids
            }
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
        """See what pools hold after batches that ended just now, and keep what was told to run or to move."""
        now_ended = {event.batch_id for event in events if isinstance(event, BatchFinished)}
        for ended in self._ended:
            is_seen = ended.batch_id in now_ended
            self._batches.append(_with_pools_of(snapshot, ended) if is_seen else ended)
        self._ended.clear()
        self._requests.failed(snapshot.now, (failure.request_id for failure in plan.failures))
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._running[instruction.batch_id] = (
                    instruction,
                    snapshot.now,
                    self._reserved(instruction, snapshot),
                )
            elif isinstance(instruction, MoveKV):
                self._moving[instruction.migration_id] = (instruction, snapshot.now)

    def _reserved(self, instruction: RunBatch, snapshot: Snapshot) -> TokensOf:
        writes = instruction.plan.num_stored_tokens
        instances = [snapshot.instance[i] for i in instruction.plan.group.instance_ids]
        self._kv_capacity.update((i.instance_id, i.kv_capacity) for i in instances)
        return tuple((i.instance_id, i.kv_used + writes.get(i.instance_id, 0)) for i in instances)


def _size_of_slice(piece: BatchSlice) -> int:
    """Return the bytes of a slice, counting ids as if no other slice had them."""
    num_ids, num_letters = len(piece.request_ids), sum(map(len, piece.request_ids))
    num_instances = piece.group.dop + len(piece.holder_ids)
    return _SLICE_BYTES + _INSTANCE_BYTES * num_instances + _ID_BYTES * num_ids + num_letters


def _size_of_move(move: KVMove) -> int:
    return _MOVE_BYTES + len(move.request_id)


def _with_pools_of(snapshot: Snapshot, ended: BatchSlice) -> BatchSlice:
    used = tuple((i, snapshot.instance[i].kv_used) for i, _ in ended.kv_used if i in snapshot.instance)
    return replace(ended, kv_used=used)


def _slice(batch: RunBatch, started_at: float, reserved: TokensOf, ended_at: float) -> BatchSlice:
    group = batch.plan.group
    prefilled = [given for given in batch.inputs if not given.is_decoding]
    return BatchSlice(
        batch.batch_id,
        group,
        _phase(len(prefilled), len(batch.inputs)),
        started_at,
        ended_at,
        batch.plan.request_ids,
        reserved,
        reserved,
        sum(len(given.token_ids) for given in prefilled),
        max((given.num_prompt_tokens for given in prefilled), default=0),
        batch.holder_ids,
    )


def _phase(num_prefilled: int, num_requests: int) -> str:
    if not num_requests or num_prefilled == num_requests:
        return "prefill"
    return "mixed" if num_prefilled else "decode"


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
    )
