"""Memory of this process that every process of the host writes into, and theirs, made once at start.

Whoever moves data on the device reserves room in it, in the same order and of the same sizes on every
process, so that what lies at an offset here lies at that offset there. `addresses[rank] + offset` is where a
kernel on this device writes to another rank's room. Two rules keep that safe, whatever process fails when:

- A batch's writes to rank r begin when `opened[r]`, a flag in this arena, is at least the first epoch of the
  batch: then r is in the batch, and done on its device with all that earlier batches brought. Each source
  writes to room of its own, so a late writer meets only itself.
- Whatever is written is told, and waited for, by flags as `loong.kernels.exchange.signals` has them, with
  epochs of the open batch. `clocks`, on the device, are set to the batch's first epoch whenever one is
  opened, so captured kernels that read one, and count on with it, need not be captured again.
"""

from enum import IntEnum, unique
from functools import partial
from math import prod
from os import close as close_descriptor
from pathlib import Path

import torch
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.memory.memory_server import MemoryServer, fetch_memory
from loong.fabric.memory.shared_memory import SharedMemory
from loong.fabric.traffic import Plane
from loong.fabric.world import World
from loong.kernels.exchange.signals import EPOCHS, Deadline

_ALIGNMENT = 256
_GRANULE = 2 << 20  # bytes; what a GPU's driver gives out
_NEVER = -1  # before every epoch


@unique
class Clock(IntEnum):
    """Who counts epochs on the device; each has a clock of its own, flags too."""

    TENSOR_PARALLEL = 0
    DECODE = 1
    QUERIES = 2


class Arena:
    """`rank`'s own memory, and the addresses of all.

    memory: uint8 [num_bytes], own. addresses: int64 [world size], on the device; this rank's own among them.
    clocks: int64 [len(Clock)], on the device. opened: flags int64 [world size] in `memory`, one a rank.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        rank: int,
        shared: SharedMemory,
        num_bytes: int,
        deadline: float,
    ) -> None:
        self.world, self.rank = world, rank
        self._directory, self._shared, self._deadline = directory, shared, deadline
        self._num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        self._num_reserved = 0
        self.memory, self._descriptor = shared.make(self._num_bytes)
        new = partial(torch.full, dtype=torch.int64, device=self.memory.device)
        self.addresses, self.clocks = new((world.size,), 0), new((len(Clock),), 0)
        self.host_addresses = [0] * world.size  # the same as `addresses`
        self._learn(rank, self.memory.data_ptr())
        stop, words = new((len(Plane), 1), _NEVER), shared.words(2 * len(Plane), _NEVER).view(len(Plane), 2)
        limit = round(deadline * 1e9)
        self._deadlines = [Deadline(words[plane], stop[plane], limit) for plane in Plane]
        self._words = words.numpy()  # the same memory, which torch takes longer to look at
        self._openings = [self.reserve(8 * world.size) for _ in Plane]  # offsets of flags, one a rank
        self._memory_server = MemoryServer(self._memory_path_of(rank), self._descriptor, self._num_bytes)

    @property
    def opened(self) -> Tensor:
        """Flags [world size]: the first epoch of the last batch that each rank has opened with this one."""
        return self.opened_on(Plane.BATCH)

    def opened_on(self, plane: Plane) -> Tensor:
        """`opened`, of batches or of migrations."""
        return self.view(self.opening_offset(plane), self.world.size, dtype=torch.int64)

    def opening_offset(self, plane: Plane) -> int:
        """Where the flags of `opened_on` begin."""
        return self._openings[plane]

    def deadline(self, plane: Plane = Plane.BATCH) -> Deadline:
        """What ends waits of a batch or a migration."""
        return self._deadlines[plane]

    def gave_up(self, plane: Plane, epoch: int) -> bool:
        """Whether something was waited for in vain since `epoch`; the device is asked only if it may be."""
        return bool(self._words[plane, 0] >= epoch) and bool(self._deadlines[plane].stop >= epoch)

    def reserve(self, num_bytes: int) -> int:
        """The offset of room of zeros. Raises ClusterError if the arena was made too small."""
        offset = self._num_reserved
        self._num_reserved += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._num_reserved > self._num_bytes:
            raise ClusterError(f"an arena of {self._num_bytes} bytes has no room for {self._num_reserved}")
        return offset

    def view(self, offset: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """This process's own memory from an offset on, as a tensor."""
        return self.memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def meet(self, rank: int) -> None:
        """Open the memory of a process that has joined, or joined again, waiting for it to be there."""
        descriptor = fetch_memory(self._memory_path_of(rank), self._num_bytes, self._deadline)
        if self.host_addresses[rank]:
            self._shared.close(self.host_addresses[rank])
        self._learn(rank, self._shared.open(descriptor, self._num_bytes))
        close_descriptor(descriptor)

    def close(self) -> None:
        """Let go of the others' memory, and give away our own to nobody any more."""
        self._memory_server.close()
        for rank, address in enumerate(self.host_addresses):
            if address and rank != self.rank:
                self._shared.close(address)
        close_descriptor(self._descriptor)

    def _learn(self, rank: int, address: int) -> None:
        self.host_addresses[rank] = address
        self.addresses[rank] = address

    def _memory_path_of(self, rank: int) -> Path:
        return self._directory / f"{rank}.arena"


def first_epoch(batch_or_migration_id: int) -> int:
    """The epoch that says that a batch or a migration has been opened; it counts on from there."""
    return batch_or_migration_id * EPOCHS


def last_epoch(batch_or_migration_id: int) -> int:
    """The last epoch there can be of a batch or a migration."""
    return first_epoch(batch_or_migration_id + 1) - 1
