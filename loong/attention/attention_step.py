"""One step of a plan, as one instance sees it.

Every instance derives what it sends and receives from the same plan and the same placements. So both ends of
a transfer agree on its size and order without a message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from loong.core.attention_tasks import attention_tasks
from loong.core.kv_layout import KVLayout
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import at_or_after, coalesce, joining
from loong.core.request import RequestId


class KVStore(Protocol):
    """The KV pool of an instance, as attention needs it."""

    def slots(self, owner_id: OwnerId, positions: range) -> Tensor:
        """Return the slots [n] int64, on the host, of positions that are stored here."""
        ...

    def list_slots(self, wanted: Iterable[tuple[OwnerId, range]], out: Tensor) -> None:
        """Write the slots of several owners, one owner after the other, to the start of `out` int64 on the
        host.
        """
        ...

    def layer(self, layer: int) -> Tensor:
        """Return the rows [S, ...] of KV of all slots of a layer, on the device."""
        ...

    def of_window(self, window: int | None) -> "KVStore":
        """Return the same with the slots of layers with a window; None: those without."""
        ...

    @property
    def layout(self) -> KVLayout:
        """Return the layout of rows, and the windows of layers."""
        ...


@dataclass(frozen=True)
class AttentionStep:
    """A step of a batch on one instance, as layers with a `window` see it; None: those without.

    `placements` is the KV before the step. `store` already has slots for the KV that the step writes here.
    What requests share is read once if that saves reading `least_saved` keys; None: never.
    """

    instance_id: InstanceId
    batch: BatchPlan
    placements: Mapping[RequestId, Placement]
    store: KVStore
    least_saved: int | None = 1
    window: int | None = None

    def by_window(self) -> "Mapping[int | None, AttentionStep]":
        """Return the step as each kind of layers sees it. Those with a window read nothing together."""
        return {
            window: self
            if window is None
            else replace(self, window=window, least_saved=None, store=self.store.of_window(window))
            for window in self.store.layout.windows
        }

    def micro_batches(self) -> "tuple[AttentionStep, ...]":
        """Return the parts of the step that alternate, which are the step itself if it has one."""
        parts = self.batch.micro_batches
        return (self,) if len(parts) == 1 else tuple(replace(self, batch=part) for part in parts)

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """The blocks whose master is this instance. Their tokens, in order, are the rows of the step."""
        return tuple(block for block in self.batch.queries if block.master_id == self.instance_id)

    @property
    def stored_blocks(self) -> Sequence[QueryBlock]:
        """Those of `blocks` whose new KV this instance makes and stores, if queries travel."""
        return self.blocks

    @cached_property
    def holder_ids(self) -> tuple[InstanceId, ...]:
        """The instances outside the group that hold KV which the step reads or makes."""
        return self.batch.holder_ids(self.placements[r] for r in self.batch.request_ids)

    @cached_property
    def has_holes(self) -> bool:
        """Return whether a request of the batch has KV behind a position that it lacks."""
        return any(self.placements[request_id].has_holes for request_id in self.batch.request_ids)

    @cached_property
    def peer_ids(self) -> tuple[InstanceId, ...]:
        """All other instances that have a part in the step, members and holders, ascending."""
        return tuple(sorted({*self.batch.group.instance_ids, *self.holder_ids} - {self.instance_id}))

    @cached_property
    def rows(self) -> dict[QueryBlock, slice]:
        """The rows of each block of `blocks`."""
        return dict(zip(self.blocks, consecutive_slices(len(b.positions) for b in self.blocks), strict=True))

    @cached_property
    def _meetings(self) -> frozenset[tuple[QueryBlock, InstanceId]]:
        tasks = attention_tasks(self.batch, self.placements, self.window)
        return frozenset((task.block, task.segment.instance_id) for task in tasks)

    def meets(self, block: QueryBlock, instance_id: InstanceId) -> bool:
        """Return whether an instance holds KV that the block attends."""
        return (block, instance_id) in self._meetings

    def requests(self, transfer: Transfer) -> tuple[RequestId, ...]:
        """Return the requests of the batch with a block of this kind of transfer."""
        return self._requests[transfer]

    def kv_on(self, source_id: InstanceId, request_id: RequestId) -> tuple[range, ...]:
        """Return the positions whose KV an instance has in this step, in the order in which the KV travels.

        The KV from before the step comes first, then the KV that the step makes.
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
        """Return the positions whose KV this instance has in this step and some query of the request may see,
        in as few ranges as possible.
        """
        if self.window is None:
            return self._all_keys_of(request_id)
        first = min(block.positions[0] for block in self.batch.blocks_of(request_id))
        return within(self.window, first, self._all_keys_of(request_id))

    def _all_keys_of(self, request_id: RequestId) -> tuple[range, ...]:
        blocks = self.batch.blocks_of(request_id)
        if len(blocks) > 1 or len(blocks[0].positions) > 1:
            return coalesce(self.kv_on(self.instance_id, request_id))
        held = self.placements[request_id].on(self.instance_id)  # a shorter way for decodes, which are many
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
        """The results of `kv_on`, by request and instance."""
        return {}

    def slots(self, request_id: RequestId, positions: Iterable[range]) -> Tensor:
        """Return this instance's slots [n] int64 of several ranges, one range after the other."""
        return concatenate(self.store.slots(request_id, p) for p in positions)


def within(window: int | None, first_query: int, kv: tuple[range, ...]) -> tuple[range, ...]:
    """Return those positions of KV that queries from `first_query` on may see."""
    if window is None:
        return kv
    return tuple(filter(None, at_or_after(kv, first_query - window + 1)))


def consecutive_slices(sizes: Iterable[int]) -> Iterator[slice]:
    """Yield adjoining slices of the given sizes, from 0."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def concatenate(pieces: Iterable[Tensor]) -> Tensor:
    """Return all pieces [n] int64 in one tensor, which is empty if there are none."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])


def all_positions(positions: Iterable[range]) -> Tensor:
    """Return the members [n] int64 of several ranges, one range after the other."""
    return concatenate(torch.arange(p.start, p.stop, p.step) for p in positions)


def row_range(rows: slice) -> Tensor:
    """Return the row numbers [n] int64 of a slice."""
    return torch.arange(rows.start, rows.stop)
