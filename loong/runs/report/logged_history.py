"""The history of a cluster, from the decision log of a server or a simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from loong.core.cluster_history import (
    BatchSlice,
    ChangeKind,
    ClusterHistory,
    InstanceChange,
    KVMove,
    RequestSpan,
)
from loong.core.instance import ESPGroup
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchEndedLine,
    BatchStartedLine,
    InstanceDrainingLine,
    InstanceJoinedLine,
    InstanceLeftLine,
    InstanceLostLine,
    InstanceState,
    Line,
    LoggedBatch,
    Migration,
    MigrationEndedLine,
    PlannedLine,
    RoomLentLine,
    RoomReturnedLine,
)
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.runs import RequestRun, RequestRuns

_Changed: TypeAlias = (
    InstanceLostLine | InstanceJoinedLine | InstanceDrainingLine | RoomLentLine | RoomReturnedLine
)


def history_of_log(path: Path) -> ClusterHistory:
    """Read the last run of a log. Its clock is the log's, with 0 at the first request.

    Raises:
        ConfigError: the file cannot be read, or is no decision log.
    """
    reading = _Reading()
    for line in read_log(path):
        reading.take(line)
    requests = tuple(map(_span, (*reading.over, *reading.runs.live)))
    batches, moves, changes = tuple(reading.batches), tuple(reading.moves), tuple(reading.changes)
    return ClusterHistory(batches, moves, reading.kv_capacity, requests, changes).after(-1.0)


@dataclass(slots=True)
class _Reading:
    """The state after the lines read so far."""

    batches: list[BatchSlice] = field(default_factory=list)
    moves: list[KVMove] = field(default_factory=list)
    changes: list[InstanceChange] = field(default_factory=list)
    kv_capacity: dict[int, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    kv_used: dict[int, int] = field(default_factory=dict)
    running: dict[int, tuple[LoggedBatch, Mapping[int, int]]] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    moving: dict[int, tuple[Migration, float]] = field(default_factory=dict)
    over: list[RequestRun] = field(default_factory=list)
    runs: RequestRuns = field(default_factory=RequestRuns)

    def __post_init__(self) -> None:
        self.runs.subscribe(self.over.append)

    def take(self, line: Line) -> None:
        """Read a line; lines that do not concern what ran are ignored."""
        self.runs(line, b"")
        match line:
            case ArrivedLine():
                self.prompts[line.request_id] = line.num_prompt_tokens
                self._see(line.instances)
            case PlannedLine():
                self._plan(line)
            case BatchStartedLine():
                self.started[line.batch_id] = line.time
            case BatchEndedLine() if line.batch_id in self.running:
                self.batches.append(self._slice(*self.running.pop(line.batch_id), line))
            case MigrationEndedLine() if line.migration_id in self.moving:
                self.moves.append(_move(*self.moving.pop(line.migration_id), line))
            case InstanceLostLine():
                self._lose(line.instance_id)
                self._change(line, ChangeKind.LOST)
            case InstanceJoinedLine():
                self._change(line, ChangeKind.JOINED)
            case InstanceDrainingLine():
                self._change(line, ChangeKind.DRAINING)
            case RoomLentLine():
                self._change(line, ChangeKind.LENT)
            case RoomReturnedLine():
                self._change(line, ChangeKind.RETURNED)
            case InstanceLeftLine():
                self.changes.append(InstanceChange(line.instance_id, ChangeKind.LEFT, line.time))

    def _change(self, line: _Changed, kind: ChangeKind) -> None:
        self.changes.append(InstanceChange(line.instance_id, kind, line.time, line.why))

    def _plan(self, line: PlannedLine) -> None:
        self._see(line.instances)
        for batch in line.batches:
            self.running[batch.batch_id] = batch, self._reserved(batch)
        for migration in line.migrations:
            self.moving[migration.migration_id] = migration, line.time

    def _see(self, instances: tuple[InstanceState, ...]) -> None:
        self.kv_used.update((state.instance_id, state.kv_used) for state in instances)
        self.kv_capacity.update((state.instance_id, state.kv_capacity) for state in instances)

    def _reserved(self, batch: LoggedBatch) -> Mapping[int, int]:
        reserved = {i: self.kv_used.get(i, 0) for i in batch.instance_ids}
        for chunk in batch.chunks:
            for instance_id, tokens in chunk.kept_on.items():
                reserved[instance_id] = reserved.get(instance_id, 0) + tokens
        for decode in batch.decodes:
            reserved[decode.master_id] = reserved.get(decode.master_id, 0) + batch.num_steps
        return reserved

    def _slice(self, batch: LoggedBatch, reserved: Mapping[int, int], end: BatchEndedLine) -> BatchSlice:
        """Return a batch that is over.

        The log does not say what its pools hold at the end, so the counts reserved at its start stand for
        both.
        """
        counts = tuple((i, reserved[i]) for i in batch.instance_ids)
        return BatchSlice(
            batch.batch_id,
            ESPGroup(batch.instance_ids),
            batch.phase,
            self.started.pop(end.batch_id),
            end.time,
            (*(chunk.request_id for chunk in batch.chunks), *(one.request_id for one in batch.decodes)),
            counts,
            counts,
            sum(chunk.num_tokens for chunk in batch.chunks),
            max(
                (self.prompts.get(chunk.request_id, chunk.stop_position) for chunk in batch.chunks), default=0
            ),
            batch.holder_ids,
        )

    def _lose(self, instance_id: int) -> None:
        self.running = {
            key: value
            for key, value in self.running.items()
            if instance_id not in (*value[0].instance_ids, *value[0].holder_ids)
        }
        self.moving = {
            key: value
            for key, value in self.moving.items()
            if instance_id not in (value[0].source_id, value[0].destination_id)
        }


def _span(run: RequestRun) -> RequestSpan:
    return RequestSpan(
        run.request_id, run.num_prompt_tokens, run.arrived_at, run.first_token_at, run.ended_at, run.end
    )


def _move(migration: Migration, started_at: float, line: MigrationEndedLine) -> KVMove:
    return KVMove(
        migration.migration_id,
        migration.request_id,
        migration.source_id,
        migration.destination_id,
        migration.num_tokens,
        started_at,
        line.time,
        line.is_committed,
        migration.keeps_source,
    )
