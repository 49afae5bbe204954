"""The order of instructions: which can be carried out now, and which wait for batches to end.

Most of a plan made for a predicted end can be sent at once: a worker takes up one batch after the
other, and the instance that samples a token knows it. Some must wait in the executor. KV of a request moves,
or is served to another group, when its batch has made all of it. A token that another instance samples, or
that a grammar must see first, has to come from there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from loong.core.events import ProducedToken
from loong.core.instructions import ExtendLease, Instruction, MoveKV, RequestInput, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock
from loong.core.request import RequestId
from loong.executor.in_flight import InFlight, SubmittedBatch


class Ready(NamedTuple):
    """An instruction to carry out now, and whether a batch `begins` with it, since its instances are idle."""

    instruction: Instruction
    begins: bool = False


class Released(NamedTuple):
    """The consequences of the end of a batch: instructions to carry out, and then batches that begin."""

    ready: list[Ready]
    begun: list[SubmittedBatch]


@dataclass(frozen=True, slots=True)
class _Held:
    """An instruction, and the batches that must have ended before."""

    instruction: Instruction
    waits_for: set[int]

    def runs(self, batch_id: int) -> bool:
        """Return whether the batch of this id begins with it."""
        return isinstance(self.instruction, RunBatch) and self.instruction.batch_id == batch_id


class BatchQueue:
    """The order of the batches `in_flight`, and the instructions that wait for some of them.

    Every instance runs its batches in the order in which they become ready. The queue must see all
    instructions and all ends of batches.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._latest: dict[InstanceId, int] = {}  # of each instance, held ones included
        self._held: list[_Held] = []
        self._last_ready: dict[InstanceId, int] = {}  # of each instance with batches that have not ended
        self._num_ready = 0

    def take(self, instruction: Instruction) -> Ready | None:
        """Take the next instruction; a batch is in flight already.

        Return it with the tokens that are known, or None if it is held.
        """
        waits_for = self._waits_for(instruction)
        if isinstance(instruction, RunBatch):
            self._latest.update(dict.fromkeys(instruction.plan.group.instance_ids, instruction.batch_id))
        instruction = self._filled(instruction)
        if not waits_for:
            return self._ready(instruction)
        self._held.append(_Held(instruction, waits_for))
        return None

    def end(self, batch_id: int, tokens: Iterable[ProducedToken] = ()) -> Released:
        """Take out a batch that has ended with these tokens, or that never will."""
        batch = self._in_flight[batch_id]
        batch.tokens = {token.request_id: token for token in tokens}
        held = [_Held(self._filled(h.instruction), h.waits_for - {batch_id}) for h in self._held]
        self._held = [one for one in held if one.waits_for]
        ready = [self._ready(one.instruction) for one in held if not one.waits_for]
        return Released(ready, self._leave(batch))

    def drop(self, is_void: Callable[[Instruction], bool]) -> None:
        """Drop held instructions that can never be carried out."""
        self._held = [held for held in self._held if not is_void(held.instruction)]

    def _ready(self, instruction: Instruction) -> Ready:
        if not isinstance(instruction, RunBatch):
            return Ready(instruction)
        instance_ids, batch_id = instruction.plan.group.instance_ids, instruction.batch_id
        before = {self._last_ready[i] for i in instance_ids if i in self._last_ready}
        self._last_ready.update(dict.fromkeys(instance_ids, batch_id))
        self._num_ready += 1
        batch = self._in_flight[batch_id]
        batch.behind, batch.ready_number = before, self._num_ready
        return Ready(instruction, begins=not before)

    def _leave(self, batch: SubmittedBatch) -> list[SubmittedBatch]:
        """Free the instances of a batch. Return the batches that begin now, as they became ready."""
        self._last_ready = {i: last for i, last in self._last_ready.items() if last != batch.batch_id}
        batch.behind.clear()
        begun = [other for other in self._in_flight.values() if other.behind == {batch.batch_id}]
        for other in self._in_flight.values():
            other.behind.discard(batch.batch_id)
        return sorted(begun, key=lambda other: other.ready_number)

    def _waits_for(self, instruction: Instruction) -> set[int]:
        match instruction:
            case RunBatch():
                unknown = {
                    n
                    for i in instruction.inputs
                    if (n := i.depends_on_batch_id) is not None and self._is_unknown(n, i, instruction)
                }
                if not instruction.holder_ids:  # which may have what these still make
                    return unknown
                return unknown | self._making(instruction.plan.request_ids, instruction.batch_id)
            case MoveKV():
                held = {
                    n
                    for other in self._held
                    if isinstance(other.instruction, MoveKV)
                    for n in other.waits_for
                }
                owner_id, during_id = instruction.migration.segment.owner_id, instruction.during_batch_id
                return held | self._making((owner_id,), during_id)  # migrations keep their order
            case StopLease() | ExtendLease():
                return {n for held in self._held if held.runs(instruction.batch_id) for n in held.waits_for}
            case _:
                return set()

    def _making(self, request_ids: Iterable[RequestId], before_id: int | None) -> set[int]:
        """Return the batches, of those before another if there is one, that still make KV of these."""
        made = set(request_ids)
        return {
            batch.batch_id
            for batch in self._in_flight.values()
            if batch.tokens is None and (before_id is None or batch.batch_id < before_id)
            if not made.isdisjoint(batch.instruction.plan.request_ids)
        }

    def _is_unknown(self, followed_id: int, given: RequestInput, instruction: RunBatch) -> bool:
        """Return whether neither the executor nor the master of a request knows its newest token."""
        followed = self._in_flight.get(followed_id)
        if followed is None or followed.tokens is not None:
            return False
        has_grammar = given.sampling_params is not None and given.sampling_params.grammar is not None
        master_id = instruction.plan.blocks_of(given.request_id)[0].master_id
        is_next = self._latest.get(master_id) == followed_id  # a batch in between may have ended first
        sampler_id = max(followed.instruction.plan.blocks_of(given.request_id), key=_last_position).master_id
        return has_grammar or master_id != sampler_id or not is_next

    def _filled(self, instruction: Instruction) -> Instruction:
        """Return the instruction with all tokens that are known."""
        if not isinstance(instruction, RunBatch) or not any(
            batch.tokens for batch in self._in_flight.values()
        ):
            return instruction
        return replace(instruction, inputs=tuple(map(self._with_token, instruction.inputs)))

    def _with_token(self, given: RequestInput) -> RequestInput:
        if given.depends_on_batch_id is None:
            return given
        followed = self._in_flight.get(given.depends_on_batch_id)
        tokens = None if followed is None else followed.tokens
        return given.with_token(tokens[given.request_id]) if tokens and given.request_id in tokens else given


def _last_position(block: QueryBlock) -> int:
    return block.positions[-1]
