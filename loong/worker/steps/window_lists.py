"""The slots that captured decode steps attend in layers with a window, which moves on with each step."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from loong.attention.attention_step import within
from loong.core.request import RequestId
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.worker.kv.pool import KVPool
from loong.worker.steps.decode_state import LeaseBatch, LeaseTables


class WindowLists:
    """Lists of up to `num_queries` queries on the device, each in the order of positions.

    A list begins with the first position in the window of the lease's first step. With each step its first
    key leaves it if the window has passed that. So a step reads no key outside of a window.
    """

    def __init__(
        self, pool: KVPool, window: int, num_queries: int, max_num_free: int, device: Device
    ) -> None:
        """Take memory for lists of that many queries, and of `max_num_free` keys that a lease makes."""
        num_slots = num_queries * min(window, pool.num_free + pool.num_used) + max_num_free
        self._pool, self._window = pool, window
        self._host = device.host_words(4 * num_queries).view(4, num_queries)
        self._queries = torch.zeros_like(self._host, device=device.torch_device)
        self._starts, self._num_keys, self._num_passed, self._positions = self._queries
        self._host_keys = device.host_words(2 * num_slots).view(2, num_slots)
        self._keys = torch.zeros_like(self._host_keys, device=device.torch_device)
        self._slots, self._key_positions = self._keys
        self._cu_seqlens = torch.zeros(num_queries + 1, dtype=torch.int32, device=device.torch_device)

    def begin(self, batch: LeaseBatch) -> None:
        """Set the lists of a lease."""
        columns = self._list_keys(batch)
        self._host.zero_()
        self._host.numpy()[:, columns[0]] = columns[1:]
        self._queries.copy_(self._host, non_blocking=True)

    def lengthen(self, batch: LeaseBatch) -> None:
        """Set the lists to those of `batch`, the same lease with more steps."""
        queries, starts, *_ = self._list_keys(batch)
        self._host[0].numpy()[queries] = starts
        self._starts.copy_(self._host[0], non_blocking=True)

    def step(self, num_queries: int, own: slice, has_slot: Tensor) -> SlotLists:
        """Return the lists of the next step's queries, by the device alone.

        Those of `own` rows have one key more if a row `has_slot`.
        """
        used = slice(0, num_queries)
        starts, num_keys, num_passed = self._starts[used], self._num_keys[used], self._num_passed[used]
        num_keys[own] += has_slot
        first = self._key_positions[(starts + num_passed).clamp(max=len(self._slots) - 1)]
        num_passed += (first <= self._positions[used] - self._window) & (num_passed < num_keys)
        self._positions[used] += 1
        cu_seqlens = self._cu_seqlens[: num_queries + 1]
        cu_seqlens[1:].copy_((num_keys - num_passed).cumsum(0))
        return SlotLists(self._slots, starts + num_passed, cu_seqlens)

    def _list_keys(self, batch: LeaseBatch) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Write the keys of a lease. Return columns of its requests: their query, and the four of a query."""
        queries, free = batch.query_of(), {row.held[0]: row.free for row in batch.rows}
        held = {i: within(self._window, batch.whole[i].position, batch.whole[i].held) for i in queries}
        listed = {i: (*positions, free.get(i, range(0))) for i, positions in held.items()}
        ends = list(accumulate([sum(map(len, pieces)) for pieces in listed.values()], initial=0))
        used = slice(0, ends[-1])
        slots, positions = self._host_keys.numpy()
        self._pool.list_slots(_pairs(listed), self._host_keys[0])
        pieces = [np.arange(p.start, p.stop, p.step) for _, p in _pairs(listed)]
        positions[used] = np.concatenate(pieces) if pieces else 0
        for start, stop, its in zip(ends, ends[1:], listed.values(), strict=False):
            if not all(a[-1] < b[0] for a, b in pairwise(filter(None, its))):
                order = start + np.argsort(positions[start:stop])
                slots[start:stop], positions[start:stop] = slots[order], positions[order]
        self._keys[:, used].copy_(self._host_keys[:, used], non_blocking=True)
        rows = [
            (query, start, sum(map(len, held[i])), 0, batch.whole[i].position)
            for (i, query), start in zip(queries.items(), ends, strict=False)
        ]
        return np.array(rows, np.int64).reshape(-1, 5).T


def window_lists(
    pool: KVPool, num_queries: int, max_num_free: int, device: Device
) -> dict[int | None, WindowLists]:
    """Return the lists for each window of the model's layers."""
    windows = [window for window in pool.layout.windows if window is not None]
    return {window: WindowLists(pool, window, num_queries, max_num_free, device) for window in windows}


def lists_by_window(
    tables: LeaseTables,
    windows: Mapping[int | None, WindowLists],
    num_queries: int,
    own: slice,
    has_slot: Tensor,
) -> Mapping[int | None, SlotLists]:
    """Return the lists of the next step for layers of each kind; those of `tables` are of no window.

    For the last two see `WindowLists.step`.
    """
    moved = {window: lists.step(num_queries, own, has_slot) for window, lists in windows.items()}
    return {None: tables.lists(num_queries), **moved}


def _pairs(listed: Mapping[RequestId, Sequence[range]]) -> list[tuple[RequestId, range]]:
    return [(request_id, positions) for request_id, pieces in listed.items() for positions in pieces]
