"""Instructions that workers cannot carry out before a batch has ended.

Most of a plan made for a predicted end can be submitted at once: workers run batches in order, and the
instance that samples a token knows it. But KV of a request moves only when its batch has made all of it, and
serves another group no earlier. A token that another instance samples, or that a grammar must check first,
must come back to the engine before.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from loong.core.events import ProducedToken
from loong.core.instructions import ExtendLease, Instruction, MoveKV, RequestInput, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class _Held:
    """An instruction, and the batches that must have ended before it."""

    instruction: Instruction
    waits_for: set[int]

    def is_of(self, batch_id: int) -> bool:
        """Return whether this is the batch of this id."""
        return isinstance(self.instruction, RunBatch) and self.instruction.batch_id == batch_id


class HeldInstructions:
    """Holds instructions that were submitted too early.

    It must see all instructions, and all batches that end.
    """

    def __init__(self) -> None:
        self._batch_of: dict[RequestId, int] = {}  # the latest that has not ended
        self._latest: dict[InstanceId, int] = {}  # that was submitted to each instance
        self._submitted: dict[int, RunBatch] = {}  # batches that others may follow
        self._tokens: dict[int, dict[RequestId, ProducedToken]] = {}  # of those of them that have ended
        self._held: list[_Held] = []

    def take(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction to carry out now; None if it is held."""
        waits_for = self._waits_for(instruction)
        if isinstance(instruction, RunBatch):
            self._open(instruction)
        instruction = self._filled(instruction)
        if not waits_for:
            return instruction
        self._held.append(_Held(instruction, waits_for))
        return None

    def end(self, batch_id: int, tokens: Iterable[ProducedToken] = ()) -> list[Instruction]:
        """Return the instructions to carry out now that a batch has ended, or never will.

        `tokens` are those that it produced last.
        """
        for request_id in self._submitted[batch_id].plan.request_ids:
            if self._batch_of.get(request_id) == batch_id:
                del self._batch_of[request_id]
        self._tokens[batch_id] = {token.request_id: token for token in tokens}
        held = [_Held(self._filled(h.instruction), h.waits_for - {batch_id}) for h in self._held]
        self._held = [one for one in held if one.waits_for]
        return [one.instruction for one in held if not one.waits_for]

    def drop(self, is_void: Callable[[Instruction], bool]) -> None:
        """Drop instructions that can never be carried out."""
        self._held = [held for held in self._held if not is_void(held.instruction)]

    def forget(self, batch_id: int) -> None:
        """Forget the tokens of a batch that has ended, since no new batch depends on it."""
        self._tokens.pop(batch_id, None)
        self._submitted.pop(batch_id, None)

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
                return held if batch_id is None else {*held, batch_id}  # migrations keep their order
            case StopLease() | ExtendLease():
                return {n for held in self._held if held.is_of(instruction.batch_id) for n in held.waits_for}
            case _:
                return set()

    def _unfinished(self, instruction: RunBatch) -> set[int]:
        """Return the batches before that still make KV of a batch's requests, which holders may have."""
        return {n for r in instruction.plan.request_ids if (n := self._batch_of.get(r)) is not None}

    def _is_unknown(self, followed_id: int, given: RequestInput, instruction: RunBatch) -> bool:
        """Return whether neither the master of a request nor this process knows its newest token."""
        followed = self._submitted.get(followed_id)
        if followed is None or followed_id in self._tokens:
            return False
        has_grammar = given.sampling_params is not None and given.sampling_params.grammar is not None
        master_id = instruction.plan.blocks_of(given.request_id)[0].master_id
        is_next = self._latest.get(master_id) == followed_id  # another batch in between may have ended first
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
