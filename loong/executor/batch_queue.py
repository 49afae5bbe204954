"""The order of instructions: which can be carried out now, and which wait for batches to end.

Most of a plan made for a predicted end can be sent at once: a worker takes up one batch after the
other, and the instance that samples a token knows it. Some must wait in the executor. KV of a request moves,
or is served to another group, when its batch has made all of it. A token that another instance samples, or
that a grammar must see first, has to come from there.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from loong.core.events import ProducedToken
from loong.core.instructions import ExtendLease, Instruction, MoveKV, RequestInput, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock
from loong.core.request import RequestId


class Ready(NamedTuple):
    """An instruction to carry out now, and whether a batch `begins` with it, since its instances are idle."""

    instruction: Instruction
    begins: bool = False


class Released(NamedTuple):
    """The consequences of the end of a batch: instructions to carry out, and then batches that begin."""

    ready: list[Ready]
    begun_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Held:
    """An instruction, and the batches that must have ended before."""

    instruction: Instruction
    waits_for: set[int]

    def runs(self, batch_id: int) -> bool:
        """Return whether the batch of this id begins with it."""
        return isinstance(self.instruction, RunBatch) and self.instruction.batch_id == batch_id


class BatchQueue:
    """Batches that have not ended, and the instructions that wait for some of them.

    Every instance runs its batches in the order in which they become ready. The queue must see all
    instructions and all ends of batches.
    """

    def __init__(self) -> None:
        self._batch_of: dict[RequestId, int] = {}  # the latest that has not ended
        self._latest: dict[InstanceId, int] = {}  # of each instance, held ones included
        self._submitted: dict[int, RunBatch] = {}  # batches on which others may depend
        self._tokens: dict[int, dict[RequestId, ProducedToken]] = {}  # of those of them that have ended
        self._held: list[_Held] = []
        self._last_ready: dict[InstanceId, int] = {}  # of each instance with batches that have not ended
        self._behind: dict[int, set[int]] = {}  # those that instances of a ready batch have to end before it

    def take(self, instruction: Instruction) -> Ready | None:
        """Take the next instruction. Return it with the tokens that are known, or None if it is held."""
        waits_for = self._waits_for(instruction)
        if isinstance(instruction, RunBatch):
            self._open(instruction)
        instruction = self._filled(instruction)
        if not waits_for:
            return self._ready(instruction)
        self._held.append(_Held(instruction, waits_for))
        return None

    def end(self, batch_id: int, tokens: Iterable[ProducedToken] = ()) -> Released:
        """Take out a batch that has ended with these tokens, or that never will."""
        if batch_id not in self._submitted:  # it was refused
            return Released([], [])
        for request_id in self._submitted[batch_id].plan.request_ids:
            if self._batch_of.get(request_id) == batch_id:
                del self._batch_of[request_id]
        self._tokens[batch_id] = {token.request_id: token for token in tokens}
        held = [_Held(self._filled(h.instruction), h.waits_for - {batch_id}) for h in self._held]
        self._held = [one for one in held if one.waits_for]
        ready = [self._ready(one.instruction) for one in held if not one.waits_for]
        return Released(ready, self._leave(batch_id))

    @property
    def held(self) -> Iterator[Instruction]:
        """The instructions that wait, in their order."""
        return (held.instruction for held in self._held)

    def drop(self, is_void: Callable[[Instruction], bool]) -> None:
        """Drop held instructions that can never be carried out."""
        self._held = [held for held in self._held if not is_void(held.instruction)]

    def forget(self, batch_id: int) -> None:
        """Forget an ended batch whose tokens the planner knows: no later batch depends on it."""
        self._tokens.pop(batch_id, None)
        self._submitted.pop(batch_id, None)

    def before(self, batch_id: int) -> Iterable[int]:
        """Return the batches that instances of a batch have yet to end before it; not those before these."""
        return self._behind.get(batch_id, ())

    def _ready(self, instruction: Instruction) -> Ready:
        if not isinstance(instruction, RunBatch):
            return Ready(instruction)
        instance_ids, batch_id = instruction.plan.group.instance_ids, instruction.batch_id
        before = {self._last_ready[i] for i in instance_ids if i in self._last_ready}
        self._last_ready.update(dict.fromkeys(instance_ids, batch_id))
        if before:
            self._behind[batch_id] = before
        return Ready(instruction, begins=not before)

    def _leave(self, batch_id: int) -> list[int]:
        """Free the instances of a batch. Return the batches that begin now."""
        self._last_ready = {i: last for i, last in self._last_ready.items() if last != batch_id}
        self._behind.pop(batch_id, None)
        begun_ids = []
        for other_id, before in self._behind.items():
            before.discard(batch_id)
            if not before:
                begun_ids.append(other_id)
        for other_id in begun_ids:
            del self._behind[other_id]
        return begun_ids

    def _waits_for(self, instruction: Instruction) -> set[int]:
        match instruction:
            case RunBatch():
                unknown = {
                    n
                    for i in instruction.inputs
                    if (n := i.depends_on_batch_id) is not None and self._is_unknown(n, i, instruction)
                }
                return unknown if not instruction.holder_ids else unknown | self._unfinished(instruction)
            case MoveKV():
                held = {
                    n
                    for other in self._held
                    if isinstance(other.instruction, MoveKV)
                    for n in other.waits_for
                }
                batch_id = self._batch_of.get(instruction.migration.segment.owner_id)
                if batch_id is None or instruction.during_batch_id is not None:
                    return held  # migrations keep their order
                return {*held, batch_id}
            case StopLease() | ExtendLease():
                return {n for held in self._held if held.runs(instruction.batch_id) for n in held.waits_for}
            case _:
                return set()

    def _unfinished(self, instruction: RunBatch) -> set[int]:
        """Return the earlier batches that still make KV of a batch's requests, which holders may have."""
        return {n for r in instruction.plan.request_ids if (n := self._batch_of.get(r)) is not None}

    def _is_unknown(self, followed_id: int, given: RequestInput, instruction: RunBatch) -> bool:
        """Return whether neither the executor nor the master of a request knows its newest token."""
        followed = self._submitted.get(followed_id)
        if followed is None or followed_id in self._tokens:
            return False
        has_grammar = given.sampling_params is not None and given.sampling_params.grammar is not None
        master_id = instruction.plan.blocks_of(given.request_id)[0].master_id
        is_next = self._latest.get(master_id) == followed_id  # a batch in between may have ended first
        sampler_id = max(followed.plan.blocks_of(given.request_id), key=_last_position).master_id
        return has_grammar or master_id != sampler_id or not is_next

    def _open(self, instruction: RunBatch) -> None:
        self._batch_of.update(dict.fromkeys(instruction.plan.request_ids, instruction.batch_id))
        self._latest.update(dict.fromkeys(instruction.plan.group.instance_ids, instruction.batch_id))
        self._submitted[instruction.batch_id] = instruction

    def _filled(self, instruction: Instruction) -> Instruction:
        """Return the instruction with all tokens that are known."""
        if not self._tokens or not isinstance(instruction, RunBatch):
            return instruction
        return replace(instruction, inputs=tuple(map(self._with_token, instruction.inputs)))

    def _with_token(self, given: RequestInput) -> RequestInput:
        if (
            given.depends_on_batch_id is None
            or (tokens := self._tokens.get(given.depends_on_batch_id)) is None
        ):
            return given
        return given.with_token(tokens[given.request_id]) if given.request_id in tokens else given


def _last_position(block: QueryBlock) -> int:
    return block.positions[-1]
