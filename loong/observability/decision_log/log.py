"""An observer of the loop that writes decisions and their results to a decision log."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec

from loong.core.applied import Applied, CommittedBatch
from loong.core.decision import Decision, DecisionKind
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
from loong.core.instructions import Instruction, RunBatch
from loong.core.plan import IterationPlan
from loong.core.request import FinishReason, RequestId
from loong.core.snapshot import Snapshot
from loong.observability.decision_log import lines
from loong.observability.decision_log.line_file import LineFile
from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.plan_line import instance_states, planned_line

STANDING = (DecisionKind.WAIT, DecisionKind.DEFER)  # repeated in each plan while they hold
FOLLOWING = "another request computes a part of the prompt that both share"

Listener: TypeAlias = Callable[[Line, bytes], None]
"""Receives every line with its encoded bytes. It must neither fail nor block."""
TargetsOf: TypeAlias = Callable[[int], tuple[float | None, float | None]]
"""Returns the TTFT and TPOT targets of a request without its own SLO, by the tokens of its prompt."""


def no_targets(_num_prompt_tokens: int) -> tuple[None, None]:
    """Return no targets."""
    return None, None


@contextmanager
def decision_log(
    path: Path | None,
    clock_start: float | None = None,
    listeners: Sequence[Listener] = (),
    policy: str | None = None,
    targets_of: TargetsOf = no_targets,
) -> Iterator["DecisionLog"]:
    """Yield the log of one run, appended to a file that may hold other runs; None: for listeners only.

    `clock_start` is the Unix time of the clock's 0, or None in virtual time. Raises `ConfigError` if the file
    cannot be opened.
    """
    file = None if path is None else LineFile(path)
    try:
        yield DecisionLog(file, clock_start, listeners, policy, targets_of)
    finally:
        if file is not None:
            file.close()


class DecisionLog:
    """The decision log. It receives each event before the plans made on it, and each plan with its
    instructions.

    A reason that a policy repeats in each plan is written only when it is new. Arrivals, and later events up
    to the next plan, wait for that plan's snapshot.
    """

    def __init__(
        self,
        file: LineFile | None,
        clock_start: float | None = None,
        listeners: Sequence[Listener] = (),
        policy: str | None = None,
        targets_of: TargetsOf = no_targets,
    ) -> None:
        self._file, self._listeners, self._targets_of = file, listeners, targets_of
        self._encoder = msgspec.json.Encoder()
        self._num_tokens: dict[RequestId, int] = {}  # output tokens of live requests
        self._held: list[Line] = []  # lines from an arrival up to the next plan
        self._said: dict[DecisionKind, dict[RequestId, str]] = {kind: {} for kind in STANDING}
        self._write(lines.StartedLine(lines.VERSION, clock_start, policy))

    def on_event(self, event: Event, applied: Applied) -> None:
        """Write an event, and the results of earlier plans."""
        match event:
            case TokensProduced():
                self._count_tokens(event)
            case BatchStarted():
                self._write(lines.BatchStartedLine(event.time, event.batch_id))
            case BatchFinished():
                self._end_batch(event, applied.ended)
            case BatchEndPredicted() | PrefixCacheReset():
                pass
            case MigrationFinished():
                self._write(lines.MigrationEndedLine(event.time, event.migration_id, event.is_committed))
            case RequestAborted():
                self._end_request(event.time, event.request_id, event.reason)
            case InstanceLost():
                self._lose(event, applied.voided)
            case InstanceJoined():
                instance = event.instance
                self._write(
                    lines.InstanceJoinedLine(
                        event.time, instance.instance_id, instance.kv_capacity, event.reason
                    )
                )
            case InstanceDraining():
                self._write(lines.InstanceDrainingLine(event.time, event.instance_id, event.reason))
            case InstanceLeft():
                self._write(lines.InstanceLeftLine(event.time, event.instance_id))
            case RoomLent() if applied.instructions:  # else it was refused
                self._write(lines.RoomLentLine(event.time, event.instance_id, event.num_tokens, event.reason))
            case RoomReturned() if applied.instructions:
                self._write(lines.RoomReturnedLine(event.time, event.instance_id, event.reason))
            case RoomLent() | RoomReturned():
                pass
            case RequestArrived():
                for choice_id in event.request.choice_ids:
                    self._arrive(event, choice_id)
            case _:
                assert_never(event)

    def on_plan(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
    ) -> None:
        """Write a plan made on `events` for `snapshot`, and the executor's instructions."""
        if self._held:
            self._write_held(snapshot)
        decisions = plan.decisions
        if snapshot.following:
            request_ids = tuple([view.request_id for view in snapshot.following])
            decisions += (Decision(DecisionKind.WAIT, request_ids, FOLLOWING),)
        if decisions:
            plan = replace(plan, decisions=tuple(self._news(decisions)))
        waits = self._said[DecisionKind.WAIT]
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                for request_id in waits.keys() & instruction.plan.request_ids:
                    del waits[request_id]
        for preemption in plan.preemptions:
            self._forget(preemption.request_id)
        for eviction in plan.evictions:
            self._forget(eviction.segment.owner_id)
        if (line := planned_line(events, snapshot, plan, instructions)) is not None:
            self._write(line)
            for failure in plan.failures:
                self._end_request(snapshot.now, failure.request_id, FinishReason.ERROR)
        elif not (snapshot.batches or snapshot.ending) and self._file is not None:
            self._file.flush()  # the next line may come much later

    def _news(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """Yield the decisions that differ from the last ones of the same kind and requests."""
        for decision in decisions:
            said = self._said.get(decision.kind)
            if said is None:
                yield decision
            elif new_ids := tuple(i for i in decision.request_ids if said.get(i) != decision.chosen):
                said.update(dict.fromkeys(new_ids, decision.chosen))
                yield replace(decision, request_ids=new_ids)

    def _forget(self, request_id: RequestId) -> None:
        for said in self._said.values():
            said.pop(request_id, None)

    def _arrive(self, event: RequestArrived, choice_id: RequestId) -> None:
        request = event.request
        has_grammar = request.sampling_params.grammar is not None
        self._num_tokens[choice_id] = 0
        slo, (ttft, tpot) = request.slo, self._targets_of(len(request.prompt_token_ids))
        self._held.append(
            lines.ArrivedLine(
                request.arrival_time,
                choice_id,
                num_prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.sampling_params.max_tokens,
                instances=(),
                ttft_slo=ttft if slo is None or slo.ttft is None else slo.ttft,
                tpot_slo=tpot if slo is None or slo.tpot is None else slo.tpot,
                user=request.user,
                choice_of=None if choice_id == request.request_id else request.request_id,
                grammar_seconds=event.time - request.arrival_time if has_grammar else 0.0,
            )
        )

    def _count_tokens(self, event: TokensProduced) -> None:
        num_tokens = self._num_tokens
        for token in event.tokens:
            request_id = token.request_id
            if request_id in num_tokens:  # an aborted request is computed until its batch ends
                num_tokens[request_id] += 1
                if num_tokens[request_id] == 1:
                    self._write(lines.FirstTokenLine(event.time, request_id))
                if token.finish_reason is not None:
                    self._end_request(event.time, request_id, token.finish_reason)

    def _end_request(self, time: float, request_id: RequestId, reason: FinishReason) -> None:
        self._forget(request_id)
        num_tokens = self._num_tokens.pop(request_id, None)
        if num_tokens is not None:
            self._write(lines.EndedLine(time, request_id, reason, num_tokens))

    def _end_batch(self, event: BatchFinished, batch: CommittedBatch | None) -> None:
        assert batch is not None, "a batch that has finished has ended"
        running = batch.running
        seconds = event.time - running.started_at if event.seconds is None else event.seconds
        ended = event.time, event.batch_id, event.num_steps
        self._write(lines.BatchEndedLine(*ended, seconds / event.num_steps, running.plan.predicted_time))

    def _lose(self, event: InstanceLost, voided: Iterable[CommittedBatch]) -> None:
        void_batch_ids = tuple(sorted(batch.running.batch_id for batch in voided))
        self._write(lines.InstanceLostLine(event.time, event.instance_id, event.reason, void_batch_ids))
        for said in self._said.values():
            said.clear()  # a request that lost its KV waits again

    def _write_held(self, snapshot: Snapshot) -> None:
        """Write the lines that waited for the instances of `snapshot`."""
        held, self._held = self._held, []
        instances = instance_states(snapshot.instances)
        for line in held:
            is_arrival = isinstance(line, lines.ArrivedLine)
            self._write(msgspec.structs.replace(line, instances=instances) if is_arrival else line)

    def _write(self, line: Line) -> None:
        if self._held:
            self._held.append(line)
            return
        encoded = self._encoder.encode(line)
        if self._file is not None:
            self._file.append(encoded)
        for listener in self._listeners:
            listener(line, encoded)
