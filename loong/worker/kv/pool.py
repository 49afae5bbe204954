"""An instance's memory for keys and values: allocated once, and assigned token by token."""

from collections.abc import Iterable, Sequence
from math import prod
from threading import Lock
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from loong.core.errors import InvalidPlanError
from loong.core.kv_layout import KVLayout, LentSlots
from loong.core.placement import OwnerId
from loong.worker.kv.free_slots import FreeSlots, Slots, runs_of
from loong.worker.kv.mapped_memory import mapped_memory
from loong.worker.kv.window_slots import WindowSlots, WindowStore

_NO_SLOT = -1
_WORD = torch.int64

_NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
_Part: TypeAlias = tuple[tuple[int, ...], Tensor]  # layers, and their memory [num_layers, num_slots, ...]


class KVPool:
    """Keys and values of `num_slots` tokens, in one tensor [num_layers, num_slots, ...] of rows of a layout.

    A slot is one token's memory in every layer. Each owner maps positions to slots; owners
    that share a prefix map its positions to the same slots, and a slot is free when no owner maps to it. Any
    thread may take and release slots. A released slot may be handed out next, so release nothing that a
    running step may still use. Slots are int64, on the host, and in the order of the requested positions; KV
    is on `device`. Memory of the host that `is_pinned` is copied to and from a GPU at full rate.

    A pool that `is_mapped` has memory of the host that other processes map. One of `lent` slots has those of
    such a pool of another process, and no others.

    With `num_window_slots`, layers with a window have a tensor of their own, for that many tokens. A slot has
    one of theirs from its allocation on, until that is released with it, or before it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        device: torch.device,
        *,
        is_pinned: bool = False,
        is_mapped: bool = False,
        lent: LentSlots | None = None,
        num_window_slots: int | None = None,
    ) -> None:
        self.layout, self.device, self._is_pinned = layout, device, is_pinned
        num_rows = num_slots if lent is None else lent.num_slots
        self._dtype, self._path = getattr(torch, layout.dtype), ""
        self._windows: WindowSlots | None = None
        if num_window_slots is not None and layout.num_window_layers:
            self._windows = WindowSlots(num_window_slots, num_rows)
        shape = (layout.num_layers - self._num_apart, num_rows, *layout.row_shape)
        if lent is None and not is_mapped:
            kv = torch.empty(shape, dtype=self._dtype, device=device, pin_memory=is_pinned)
        else:
            memory, self._path = mapped_memory(prod(shape) * self._dtype.itemsize, lent)
            kv = memory.view(self._dtype).view(shape)
        self._parts = self._parts_of(kv)
        layers = {n: memory for part in self._parts for n, memory in zip(*part, strict=True)}
        self._layers = tuple([layers[n] for n in range(layout.num_layers)])
        self._free = FreeSlots(num_slots) if lent is None else FreeSlots.of(lent.runs)
        self._num_slots = len(self._free)
        self._num_owners = np.zeros(num_rows, dtype=np.int32)
        self._maps: dict[OwnerId, _PositionMap] = {}
        self._lock = Lock()  # guards the three above, and slots of windows

    @property
    def num_layers(self) -> int:
        """Return the number of layers whose KV a slot holds."""
        return len(self._layers)

    @property
    def num_free(self) -> int:
        """Return the number of slots that no owner maps to."""
        return len(self._free)

    @property
    def room(self) -> int:
        """Return the number of tokens for which there are free slots in all layers."""
        return self.num_free if self._windows is None else min(self.num_free, self._windows.num_free)

    @property
    def num_used(self) -> int:
        """Return the number of slots that some owner maps to; shared ones count once."""
        return self._num_slots - self.num_free

    def lend(self, owner_id: OwnerId, num_slots: int) -> LentSlots:
        """Take free slots for a pool of another process, until `owner_id` is released.

        Raises InvalidPlanError if too few are free.
        """
        slots = np.sort(self.allocate(owner_id, range(num_slots), num_slots).numpy())
        return LentSlots(self._path, len(self._num_owners), runs_of(slots))

    def allocate(
        self,
        owner_id: OwnerId,
        positions: range,
        num_expected: int = 0,
        windowless: Sequence[range] = (),
    ) -> Tensor:
        """Take a free slot for each of `positions` and return them, [n].

        `num_expected` is the owner's expected need, these included, and guides the choice of slots. Positions
        of `windowless` get none in layers with a window. Raises InvalidPlanError, and takes none, if too few
        are free or one of `positions` has a slot.
        """
        with self._lock:
            if len(positions) > len(self._free):
                raise InvalidPlanError(
                    f"{owner_id} is to store {len(positions)} tokens, but {self.num_free} slots are free"
                )
            position_map = self._unmapped(owner_id, positions)
            has_window = _is_outside(positions, windowless)
            if self._windows is not None:
                self._windows.check_room(int(np.count_nonzero(has_window)))
            slots = self._free.take(len(positions), position_map.last_slot, num_expected)
            self._map(owner_id, position_map, positions, slots)
            self._num_owners[slots] = 1  # none had it before
            if self._windows is not None:
                self._windows.take(slots[has_window])
        return torch.from_numpy(slots)

    def allocate_few_each(self, wanted: Sequence[tuple[OwnerId, range]]) -> None:
        """Take a free slot for each of a few positions of many owners, as decodes need them with every step.

        Raises InvalidPlanError as `allocate` does.
        """
        number = sum([len(positions) for _, positions in wanted])
        with self._lock:
            if number > len(self._free):
                raise InvalidPlanError(
                    f"{number} tokens are to be stored, but {self.num_free} slots are free"
                )
            for owner_id, positions in wanted:
                if owner_id in self._maps:
                    self._unmapped(owner_id, positions)
            if self._windows is not None:
                self._windows.check_room(number)
            slots = self._free.take_few_each(number)
            self._num_owners[slots] = 1
            if self._windows is not None:
                self._windows.take(slots)
            first = 0
            for owner_id, positions in wanted:
                stop = first + len(positions)
                self._map(owner_id, self._map_of(owner_id), positions, slots[first:stop])
                first = stop

    def slots(self, owner_id: OwnerId, positions: range) -> Tensor:
        """Return the slots [n] of `positions`. Raises `InvalidPlanError` if one has none."""
        with self._lock:
            return torch.from_numpy(self._mapped(owner_id, positions).copy())

    def list_slots(self, wanted: Iterable[tuple[OwnerId, range]], out: Tensor) -> None:
        """Write the slots of some positions of each of these, one after the other, to the first of `out` [n].

        For many at once, as a step has them. Raises InvalidPlanError if a position has none.
        """
        with self._lock:
            pieces = [self._mapped(owner_id, positions) for owner_id, positions in wanted]
            if pieces:
                np.concatenate(pieces, out=out.numpy()[: sum(map(len, pieces))])

    def share(self, owner_id: OwnerId, other_owner_id: OwnerId, positions: range) -> None:
        """Map `positions` of `other_owner_id` to the slots that they have with `owner_id`.

        Raises InvalidPlanError, and shares none, if one has no slot there, or has one here.
        """
        with self._lock:
            position_map, slots = self._unmapped(other_owner_id, positions), self._mapped(owner_id, positions)
            self._map(other_owner_id, position_map, positions, slots)
            self._num_owners[slots] += 1

    def release(self, owner_id: OwnerId) -> None:
        """Release all slots of an owner, if it has any."""
        with self._lock:
            position_map = self._maps.pop(owner_id, None)
            if position_map is not None:
                self._unmap(position_map.clear(range(position_map.capacity)))

    def release_positions(self, released: Iterable[tuple[OwnerId, range]]) -> None:
        """Release the slots of some positions of these owners; no two share a slot."""
        with self._lock:
            slots = [_NO_SLOTS]
            for owner_id, positions in released:
                position_map = self._maps.get(owner_id)
                if position_map is not None and positions:
                    slots.append(position_map.clear(positions))
                    if position_map.is_empty:
                        del self._maps[owner_id]
            self._unmap(np.concatenate(slots))

    def release_windows(self, owner_id: OwnerId, positions: range) -> None:
        """Release the slots in layers with a window that the slots of `positions` have, if any."""
        with self._lock:
            if self._windows is not None and (position_map := self._maps.get(owner_id)) is not None:
                known = position_map.view(positions)
                self._windows.drop(known[known != _NO_SLOT])

    def of_window(self, window: int | None) -> "KVPool | WindowStore":
        """Return the pool with the slots of layers with a window; None: those without."""
        return self if window is None or self._windows is None else WindowStore(self, self._windows)

    def layer(self, layer: int) -> Tensor:
        """Return the memory of a layer, rows [num_slots, ...], or those of layers with a window."""
        memory: Tensor = self._layers[layer]
        return memory

    def scatter(self, slots: Tensor, kv: Tensor) -> None:
        """Write kv [num_layers, n, ...], which may be on any device, into distinct slots [n]."""
        kv = kv.to(self.device)
        for layers, memory in self._parts:
            rows = _rows(memory, self._slots_in(memory, slots))
            _words(memory).index_copy_(0, rows, _words(_layers_of(kv, layers)))

    def gather(self, slots: Tensor) -> Tensor:
        """Return a copy of the KV [num_layers, n, ...] of slots [n].

        That of layers with a window is anything where there is none.
        """
        kv = self.empty_rows(len(slots))
        for layers, memory in self._parts:
            rows = _rows(memory, self._slots_in(memory, slots))
            if len(layers) == len(kv):
                torch.index_select(_words(memory), 0, rows, out=_words(kv))
            else:
                kv[list(layers)] = memory.flatten(0, 1)[rows].view(len(layers), *kv.shape[1:])
        return kv

    def empty_rows(self, num_tokens: int) -> Tensor:
        """Return memory outside the pool for the KV of tokens in all layers, [num_layers, n, ...]."""
        shape = (self.num_layers, num_tokens, *self.layout.row_shape)
        return torch.empty(shape, dtype=self._dtype, device=self.device, pin_memory=self._is_pinned)

    @property
    def _num_apart(self) -> int:
        """Return the number of layers with slots of their own."""
        return 0 if self._windows is None else self.layout.num_window_layers

    def _parts_of(self, kv: Tensor) -> "list[_Part]":
        """Return the memory of layers with the same slots; `kv` is that of those without a window."""
        if self._windows is None:
            return [(tuple(range(self.layout.num_layers)), kv)]
        num_rows = self._windows.num_slots + 1
        shape = (self._num_apart, num_rows, *self.layout.row_shape)
        of_windows = torch.empty(shape, dtype=self._dtype, device=self.device, pin_memory=self._is_pinned)
        apart = tuple([n for n, window in enumerate(self.layout.layer_windows) if window is not None])
        others = tuple([n for n, window in enumerate(self.layout.layer_windows) if window is None])
        return [(others, kv), (apart, of_windows)]

    def _slots_in(self, memory: Tensor, slots: Tensor) -> Tensor:
        """Return the slots [n] in the memory of a part, on the device."""
        if self._windows is not None and memory is not self._parts[0][1]:
            slots = torch.from_numpy(self._windows.of(slots.cpu().numpy()))
        return slots.to(self.device)

    def _mapped(self, owner_id: OwnerId, positions: range) -> Slots:
        """Return the slots of positions as a view of the map: read them under the lock.

        Raises `InvalidPlanError` if a position has none.
        """
        position_map = self._map_of(owner_id)
        known = position_map.view(positions)
        if not position_map.surely_has(positions) and (num_missing := len(positions) - _num_mapped(known)):
            raise InvalidPlanError(
                f"{num_missing} of the {len(positions)} positions {positions} of {owner_id} have no slot"
            )
        return known

    def _unmapped(self, owner_id: OwnerId, positions: range) -> "_PositionMap":
        """Return the map of an owner, in which none of `positions` may have a slot."""
        position_map = self._map_of(owner_id)
        if not position_map.ends_before(positions) and (
            num_mapped := _num_mapped(position_map.view(positions))
        ):
            raise InvalidPlanError(
                f"{num_mapped} of the {len(positions)} positions {positions} of {owner_id} have a slot"
            )
        return position_map

    def _map(self, owner_id: OwnerId, position_map: "_PositionMap", positions: range, slots: Slots) -> None:
        if positions:
            position_map.write(positions, slots)
            self._maps[owner_id] = position_map

    def _map_of(self, owner_id: OwnerId) -> "_PositionMap":
        return self._maps.get(owner_id) or _PositionMap()

    def _unmap(self, slots: Slots) -> None:
        self._num_owners[slots] -= 1
        freed = slots[self._num_owners[slots] == 0]
        if self._windows is not None:
            self._windows.drop(freed)
        self._free.give(freed)


def _rows(memory: Tensor, slots: Tensor) -> Tensor:
    """Return the rows [num_layers * n] of slots [n] in all layers of memory, one layer after the other."""
    firsts = torch.arange(len(memory), device=memory.device) * memory.shape[1]
    return (firsts[:, None] + slots).flatten()


def _layers_of(kv: Tensor, layers: Sequence[int]) -> Tensor:
    return kv if len(layers) == len(kv) else kv[list(layers)]


def _is_outside(positions: range, ranges: Iterable[range]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return for each of some positions whether none of these ranges has it."""
    is_outside = np.ones(len(positions), dtype=np.bool_)
    if len(positions) and (ranges := tuple(ranges)):
        members = np.arange(positions.start, positions.stop, positions.step)
        for its in ranges:
            offset = members - its.start
            is_outside &= (members < its.start) | (members >= its.stop) | (offset % its.step != 0)
    return is_outside


def _words(kv: Tensor) -> Tensor:
    """Return KV [num_layers, n, ...] as [num_layers * n, words]: wide elements are faster to copy."""
    return kv.flatten(2).flatten(0, 1).view(_WORD)


class _PositionMap:
    """The slots of one owner by position: an array [capacity] with room to spare, so a range is a slice."""

    def __init__(self) -> None:
        self._slots = np.empty(0, dtype=np.int64)
        self._num_mapped = 0
        self._stop = 0  # no position from here on has a slot
        self.last_slot: int | None = None  # the slot that was written last

    @property
    def capacity(self) -> int:
        """Return one more than the last position it has room for."""
        return len(self._slots)

    @property
    def is_empty(self) -> bool:
        """Return whether no position has a slot."""
        return self._num_mapped == 0

    def surely_has(self, positions: range) -> bool:
        """Return whether all of `positions` have a slot; false also if that is not known without a search."""
        return not positions or (self._num_mapped == self._stop and positions[-1] < self._stop)

    def ends_before(self, positions: range) -> bool:
        """Return whether no position from the first of `positions` on has a slot; false also if unknown."""
        return not positions or self._stop <= positions[0]

    def view(self, positions: range) -> Slots:
        """Return the slots of `positions` within its capacity, `_NO_SLOT` where there is none."""
        return self._slots[positions.start : positions.stop : positions.step]

    def write(self, positions: range, slots: Slots) -> None:
        """Set the slots [n] of `positions`, which are not empty and have none."""
        last = positions[-1]
        if last >= self.capacity:
            grown = np.full(max(last + 1, 2 * self.capacity), _NO_SLOT)
            grown[: self.capacity] = self._slots
            self._slots = grown
        self._slots[positions.start : positions.stop : positions.step] = slots
        self._num_mapped += len(slots)
        if last >= self._stop:
            self._stop = last + 1
        self.last_slot = int(slots[-1])

    def clear(self, positions: range) -> Slots:
        """Forget the slots of `positions`, and return those there were."""
        known = self.view(positions)
        slots: Slots = known.copy() if self.surely_has(positions) else known[known != _NO_SLOT]
        known[:] = _NO_SLOT
        self._num_mapped -= len(slots)
        if positions.step == 1 and positions.start < self._stop <= positions.stop:
            self._stop = positions.start
        return slots


def _num_mapped(slots: Slots) -> int:
    return int(np.count_nonzero(slots != _NO_SLOT))
