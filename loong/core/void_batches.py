"""The batches that a lost instance makes void: they never end, and are computed again."""

from collections.abc import Container, Iterable, Sequence, Set
from typing import NamedTuple, assert_never

from loong.core.instructions import (
    ExtendLease,
    Instruction,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    ShareKV,
    StopLease,
)
from loong.core.placement import InstanceId
from loong.core.request import RequestId


class BatchParts(NamedTuple):
    """A batch in flight, with all instances that have a part in it, and its requests."""

    batch_id: int
    participant_ids: Sequence[InstanceId]
    request_ids: Iterable[RequestId]

    @classmethod
    def of(cls, batch: RunBatch) -> "BatchParts":
        """Return the parts of a submitted batch."""
        return cls(batch.batch_id, batch.participant_ids, batch.plan.request_ids)


def void_batches(
    in_flight: Iterable[BatchParts], lost_ids: Set[InstanceId], named_ids: Container[int] = ()
) -> tuple[int, ...]:
    """Return the batches of `in_flight`, which are in the order of their submission, that are void.

    A batch is void if a lost instance has a part in it, or if it is named. It is void, too, if a void batch
    before it has a request of it.
    """
    void_ids, request_ids = list[int](), set[RequestId]()
    for batch in in_flight:
        if (
            batch.batch_id in named_ids
            or not lost_ids.isdisjoint(batch.participant_ids)
            or not request_ids.isdisjoint(batch.request_ids)
        ):
            void_ids.append(batch.batch_id)
            request_ids.update(batch.request_ids)
    return tuple(void_ids)


def is_void(instruction: Instruction, lost_ids: Set[InstanceId], void_ids: Container[int]) -> bool:
    """Return whether an instruction is of a void batch, or for KV or slots of a lost instance."""
    match instruction:
        case RunBatch() | ExtendLease() | StopLease():
            return instruction.batch_id in void_ids
        case MoveKV():
            segment, destination_id = instruction.migration.segment, instruction.migration.destination_id
            return not lost_ids.isdisjoint((segment.instance_id, destination_id))
        case LendSlots():
            return instruction.instance_id in lost_ids
        case ReleaseKV() | ReleaseWindows() | ShareKV():
            return False
        case _:
            assert_never(instruction)
