"""The slots of layers with a window, of which a pool has fewer than of others."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from loong.core.errors import InvalidPlanError
from loong.core.kv_layout import KVLayout
from loong.core.placement import OwnerId
from loong.worker.kv.free_slots import FreeSlots, Slots

if TYPE_CHECKING:
    from loong.worker.kv.pool import KVPool


class WindowSlots:
    """The slot in layers with a window of each slot of a pool; row `num_slots` stands for none.

    That row is written and copied like others, and no query reads it.
    """

    def __init__(self, num_slots: int, num_pool_slots: int) -> None:
        self.num_slots = num_slots
        self._of = np.full(num_pool_slots, num_slots, dtype=np.int64)
        self._free = FreeSlots(num_slots)

    @property
    def num_free(self) -> int:
        """Return the number of these slots that no slot of the pool has."""
        return len(self._free)

    def of(self, slots: Slots) -> Slots:
        """Return the slots [n] in layers with a window of slots [n]."""
        found: Slots = self._of[slots]
        return found

    def check_room(self, number: int) -> None:
        """Raise InvalidPlanError if fewer than `number` are free."""
        if number > len(self._free):
            raise InvalidPlanError(
                f"{number} tokens are to be stored in layers with a window, "
                f"but {len(self._free)} of their slots are free"
            )

    def take(self, slots: Slots) -> None:
        """Give each of slots [n], which have none, one of these; as many are free."""
        self._of[slots] = self._free.take(len(slots))

    def drop(self, slots: Slots) -> None:
        """Take back those of slots [n], as far as they have any."""
        had = self._of[slots]
        self._free.give(np.unique(had[had != self.num_slots]))
        self._of[slots] = self.num_slots


class WindowStore:
    """A pool as layers with a window see it: their slots, where the pool has fewer of them."""

    def __init__(self, pool: "KVPool", of: WindowSlots) -> None:
        self._pool, self._of = pool, of

    @property
    def layout(self) -> KVLayout:
        """Return the layout of rows."""
        return self._pool.layout

    def layer(self, layer: int) -> Tensor:
        """Return the memory of a layer, rows [num_slots, ...]."""
        return self._pool.layer(layer)

    def of_window(self, window: int | None) -> "KVPool | WindowStore":
        """Return the same, or the pool for layers without a window."""
        return self._pool if window is None else self

    def slots(self, owner_id: OwnerId, positions: range) -> Tensor:
        """Return the slots [n] of `positions`; see `KVPool.slots`."""
        return torch.from_numpy(self._of.of(self._pool.slots(owner_id, positions).numpy()))

    def list_slots(self, wanted: Iterable[tuple[OwnerId, range]], out: Tensor) -> None:
        """Write the slots of several owners to the first of `out` [n]; see `KVPool.list_slots`."""
        wanted = tuple(wanted)
        self._pool.list_slots(wanted, out)
        listed = out.numpy()[: sum(len(positions) for _, positions in wanted)]
        listed[:] = self._of.of(listed)
