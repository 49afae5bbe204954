"""Attention of several requests over KV that all of them read, which is read once (RelayAttention).

The queries of a group become rows of one matrix product, without a mask. What each request reads alone is
attended apart, and both are merged by their log-sum-exps.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.placement import InstanceId, Placement
from loong.core.plan import QueryBlock
from loong.core.positions import subtract
from loong.core.request import RequestId
from loong.core.shared_kv import LEAST_ALONE, MAX_LEVELS, NOTHING_SHARED, SharedReads, shared_reads
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.model.device import Device


@dataclass(frozen=True, slots=True)
class SharedReaders:
    """Requests of a step, and what they read together in the pools of some instances, mostly of one."""

    request_ids: Sequence[RequestId]
    reads: SharedReads
    positions: Mapping[RequestId, tuple[range, ...]]  # that each reads with others

    @classmethod
    def of(
        cls,
        instance_ids: Collection[InstanceId],
        placements: Mapping[RequestId, Placement],
        firsts: Mapping[RequestId, int],
        least_saved: int | None,
    ) -> "SharedReaders":
        """Return what these requests read together on instances, given the first query of each.

        Nothing, if one pass is not worth it with `least_saved`, or if that is None.
        """
        request_ids = tuple(firsts)
        reads = NOTHING_SHARED
        if least_saved is not None and any(placements[i].shared for i in request_ids):
            shared = [
                [
                    segment
                    for segment in placements[i].shared
                    if segment.instance_id in instance_ids and segment.positions[-1] < firsts[i]
                ]
                for i in request_ids
            ]
            reads = shared_reads(shared)
            if not reads.is_worth(least_saved):
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

    def members(self, number: int) -> list[RequestId]:
        """Return the readers of a group."""
        return self.ordered_ids[slice_of(self.reads.groups[number].readers)]

    @property
    def listed(self) -> list[tuple[RequestId, range]]:
        """Return owners and positions of the shared slots, group by group: those of its first reader."""
        found = []
        for number, group in enumerate(self.reads.groups):
            found += [(self.members(number)[0], positions) for positions in group.positions]
        return found

    @property
    def num_listed(self) -> int:
        """Return the number of shared slots."""
        return sum([group.num_keys for group in self.reads.groups])

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


def readers_of(
    step: AttentionStep,
    blocks: Iterable[QueryBlock],
    instance_ids: Collection[InstanceId],
    room: int | None = None,
) -> SharedReaders:
    """Return what blocks of a step read together on instances, with up to `room` queries; None: any number.

    Requests with many queries read alone, since their attention is bound by computing.
    """
    firsts: dict[RequestId, int] = {}
    num_queries: Counter[RequestId] = Counter()
    for block in blocks:
        first = block.positions[0]
        firsts[block.request_id] = min(first, firsts.get(block.request_id, first))
        num_queries[block.request_id] += len(block.positions)
    few = [i for i in firsts if num_queries[i] < LEAST_ALONE]
    if room is not None and sum([num_queries[i] for i in few]) > room:
        few = _fitting(few, num_queries, room)
    return SharedReaders.of(instance_ids, step.placements, {i: firsts[i] for i in few}, step.least_saved)


def _fitting(
    request_ids: Iterable[RequestId], num_queries: Mapping[RequestId, int], room: int
) -> list[RequestId]:
    """Return the requests with fewest queries that have up to `room` together."""
    found = []
    for request_id in sorted(request_ids, key=num_queries.__getitem__):
        room -= num_queries[request_id]
        if room < 0:
            break
        found.append(request_id)
    return found


def shared_table(
    readers: SharedReaders, blocks: Iterable[tuple[QueryBlock, int]], slots: Tensor, device: Device
) -> SharedTable | None:
    """Return the groups of blocks over what they read together in `slots` [S]; None if that is nothing.

    Groups have no queries of requests without a block.
    """
    rows: dict[RequestId, list[range]] = {}
    for block, row in blocks:
        rows.setdefault(block.request_id, []).append(range(row, row + len(block.positions)))
    ordered = [list(chain.from_iterable(rows.get(request_id, ()))) for request_id in readers.ordered_ids]
    numbers = list(chain.from_iterable(ordered))
    if not numbers:
        return None
    num_levels = 1 if readers.reads.num_levels == 1 else MAX_LEVELS  # few kernels for all trees
    tasks = torch.tensor(list(readers.tasks(list(map(len, ordered)), len(numbers))))
    return SharedTable(
        device.upload(torch.tensor(numbers)), num_levels, device.upload(tasks), device.upload(slots)
    )


def slice_of(positions: range) -> slice:
    """Return consecutive positions as a slice."""
    return slice(positions.start, positions.stop)
