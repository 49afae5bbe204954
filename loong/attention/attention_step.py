"""One step of a plan, as one instance sees it.

Every instance derives what it sends and receives from the same plan and the same placements, so both ends
of every transfer agree on sizes and order without a word.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from loong.core.attention_tasks import attention_tasks
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import coalesce, joining
from loong.core.request import RequestId


class KVStore(Protocol):
    """An instance's KV pool, as attention needs it."""

    def slots(self, owner_id: OwnerId, positions: range) -> Tensor:
        """Slots [n] int64 of positions that have one, on the host."""
        ...

    def list_slots(self, wanted: Iterable[tuple[OwnerId, range]], out: Tensor) -> None:
        """Write slots of several owners, one after the other, to the first of `out` int64, on the host."""
        ...

    def layer(self, layer: int) -> Tensor:
        """Keys and values of all slots [S, 2, K, D], on the device."""
        ...


@dataclass(frozen=True)
class AttentionStep:
    """A step of a batch on one instance.

    `placements` is the KV before it; `store` has slots for what it writes here.
    """

    instance_id: InstanceId
    batch: BatchPlan
    placements: Mapping[RequestId, Placement]
    store: KVStore

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """The blocks whose master this instance is: their tokens, in order, are the rows of the step."""
        return tuple(block for block in self.batch.queries if block.master_id == self.instance_id)

    @cached_property
    def rows(self) -> dict[QueryBlock, slice]:
        """The rows of each own block."""
        return dict(zip(self.blocks, consecutive_slices(len(b.positions) for b in self.blocks), strict=True))

    @cached_property
    def _meetings(self) -> frozenset[tuple[QueryBlock, InstanceId]]:
        tasks = attention_tasks(self.batch, self.placements)
        return frozenset((task.block, task.segment.instance_id) for task in tasks)

    def meets(self, block: QueryBlock, instance_id: InstanceId) -> bool:
        """Whether an instance has KV that the block attends."""
        return (block, instance_id) in self._meetings

    def requests(self, transfer: Transfer) -> tuple[RequestId, ...]:
        """The requests of the batch of which this travels."""
        return self._requests[transfer]

    def kv_on(self, source_id: InstanceId, request_id: RequestId) -> tuple[range, ...]:
        """The positions of which an instance has KV in this step, in the order in which it travels.

        First what was there before, then what the step makes.
        """
        if request_id not in self._kv:
            there: dict[InstanceId, list[range]] = {}
            for segment in self.placements[request_id].segments:
                there.setdefault(segment.instance_id, []).append(segment.positions)
            for block in self.batch.blocks_of(request_id):
                there.setdefault(block.master_id, []).append(block.positions)
            self._kv[request_id] = there
        return tuple(self._kv[request_id].get(source_id, ()))

    def keys_of(self, request_id: RequestId) -> tuple[range, ...]:
        """The positions of which this instance has KV in this step, in as few ranges as they fit."""
        blocks = self.batch.blocks_of(request_id)
        if len(blocks) > 1 or len(blocks[0].positions) > 1:
            return coalesce(self.kv_on(self.instance_id, request_id))
        held = self.placements[request_id].on(self.instance_id)  # quickly, for decodes are many
        if blocks[0].master_id != self.instance_id:
            return held
        return joining(held, blocks[0].positions)

    @cached_property
    def _requests(self) -> Mapping[Transfer, tuple[RequestId, ...]]:
        return {
            transfer: tuple(dict.fromkeys(b.request_id for b in self.batch.queries if b.transfer is transfer))
            for transfer in Transfer
        }

    @cached_property
    def _kv(self) -> dict[RequestId, dict[InstanceId, list[range]]]:
        """What `kv_on` has found, by request and instance."""
        return {}

    def slots(self, request_id: RequestId, positions: Iterable[range]) -> Tensor:
        """This instance's slots [n] int64 of several ranges, one after the other."""
        return concatenate(self.store.slots(request_id, p) for p in positions)


def consecutive_slices(sizes: Iterable[int]) -> Iterator[slice]:
    """Adjoining slices of the given sizes, from 0."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def concatenate(pieces: Iterable[Tensor]) -> Tensor:
    """All pieces [n] int64 in one tensor; an empty one if there are none."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])


def members(positions: Iterable[range]) -> Tensor:
    """The members [n] int64 of several ranges, one after the other."""
    return concatenate(torch.arange(p.start, p.stop, p.step) for p in positions)


def row_range(rows: slice) -> Tensor:
    """The numbers [n] int64 of the rows of a slice."""
    return torch.arange(rows.start, rows.stop)
