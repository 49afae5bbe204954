"""Attention of several requests over KV that all of them read, which is read once (RelayAttention).

The queries of a group become rows of one matrix product, without a mask. What each request reads alone is
attended apart, and both are merged by their log-sum-exps.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from loong.attention.attention_step import AttentionStep, concatenate
from loong.core.placement import InstanceId, Placement
from loong.core.plan import QueryBlock
from loong.core.positions import subtract
from loong.core.request import RequestId
from loong.core.shared_kv import MAX_LEVELS, NOTHING_SHARED, SharedReads, on, shared_reads
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.model.device import Device

LEAST_ALONE = 256  # queries of a request in a step


@dataclass(frozen=True, slots=True)
class SharedReaders:
    """Requests of a step, and what they read together in the pool of one instance."""

    request_ids: Sequence[RequestId]
    reads: SharedReads
    positions: Mapping[RequestId, tuple[range, ...]]  # that each reads with others

    @classmethod
    def of(
        cls,
        instance_id: InstanceId,
        placements: Mapping[RequestId, Placement],
        firsts: Mapping[RequestId, int],
        least_saved: int | None,
    ) -> "SharedReaders":
        """Return what these requests read together, given the first query of each.

        Nothing, if fewer than `least_saved` keys would be read once less, or if that is None.
        """
        request_ids = tuple(firsts)
        reads = NOTHING_SHARED
        if least_saved is not None and any(placements[i].shared for i in request_ids):
            shared = [
                [s for s in on(placements[i].shared, instance_id) if s.positions[-1] < firsts[i]]
                for i in request_ids
            ]
            reads = shared_reads(shared)
            if reads.num_saved < max(1, least_saved):
                reads = NOTHING_SHARED
        positions = {request_ids[reader]: shared for reader, shared in reads.positions_of().items()}
        return cls(request_ids, reads, positions)

    @property
    def is_reading(self) -> bool:
        """Return whether anything is read together."""
        return bool(self.reads.groups)

    def alone(self, request_id: RequestId, positions: tuple[range, ...]) -> tuple[range, ...]:
        """Return those of a request's positions here that it does not read with others."""
        shared = self.positions.get(request_id, ())
        return subtract(positions, *shared) if shared else positions

    @property
    def ordered_ids(self) -> list[RequestId]:
        """Return the requests of groups, in the order of their rows."""
        return [self.request_ids[reader] for reader in self.reads.order]

    @property
    def listed(self) -> list[tuple[RequestId, range]]:
        """Return owners and positions of the shared slots, group by group: those of its first reader."""
        found = []
        for group in self.reads.groups:
            request_id = self.request_ids[self.reads.order[group.readers.start]]
            found += [(request_id, positions) for positions in group.positions]
        return found

    def tasks(self, num_rows: Sequence[int], rows_of_level: int, first_key: int = 0) -> Iterator[AttendTask]:
        """Yield a task of each group over the slots `listed`, which begin at `first_key`.

        `num_rows` are the query rows of each request in order. Level l has rows from l * `rows_of_level` on.
        """
        for group in self.reads.groups:
            before, its = sum(num_rows[: group.readers.start]), sum(num_rows[slice_of(group.readers)])
            row = group.level * rows_of_level + before
            yield AttendTask.full(row, its, first_key, group.num_keys)
            first_key += group.num_keys


NO_READERS = SharedReaders((), NOTHING_SHARED, {})


def readers_of(step: AttentionStep, blocks: Sequence[tuple[QueryBlock, int]]) -> SharedReaders:
    """Return what blocks of a step, given with their first rows, read together in this instance's pool.

    Requests with many queries read alone, since their attention is bound by computing.
    """
    firsts: dict[RequestId, int] = {}
    num_queries: Counter[RequestId] = Counter()
    for block, _ in blocks:
        first = block.positions[0]
        firsts[block.request_id] = min(first, firsts.get(block.request_id, first))
        num_queries[block.request_id] += len(block.positions)
    firsts = {i: first for i, first in firsts.items() if num_queries[i] < LEAST_ALONE}
    return SharedReaders.of(step.instance_id, step.placements, firsts, step.least_saved)


def shared_table(
    step: AttentionStep, readers: SharedReaders, blocks: Sequence[tuple[QueryBlock, int]], device: Device
) -> SharedTable | None:
    """Return the groups of blocks over what they read together; None if that is nothing."""
    if not readers.is_reading:
        return None
    rows: dict[RequestId, list[range]] = {}
    for block, row in blocks:
        rows.setdefault(block.request_id, []).append(range(row, row + len(block.positions)))
    ordered = [list(chain.from_iterable(rows[request_id])) for request_id in readers.ordered_ids]
    numbers = torch.tensor(list(chain.from_iterable(ordered)))
    num_levels = 1 if readers.reads.num_levels == 1 else MAX_LEVELS  # few kernels for all trees
    tasks = torch.tensor(list(readers.tasks(list(map(len, ordered)), len(numbers))))
    slots = concatenate(step.store.slots(*listed) for listed in readers.listed)
    return SharedTable(device.upload(numbers), num_levels, device.upload(tasks), device.upload(slots))


def slice_of(positions: range) -> slice:
    """Return consecutive positions as a slice."""
    return slice(positions.start, positions.stop)
