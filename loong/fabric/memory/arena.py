"""Memory of each process that all processes of the host write into, mapped once at start.

Code that moves data on the device reserves space in it. Every process does so in the same order and sizes, so
offsets are equal everywhere. A kernel on this device writes to rank r's space at `addresses[r] + offset`. Two
rules make that safe even if a process fails:

- Writes of a batch to rank r begin when `opened[r]`, a flag in this arena, is at least the batch's first
  epoch. Then r is in the batch, and its device is done with the data of earlier batches. Each source writes
  to its own space, so a late write cannot change other data.
- Writes are signaled and awaited by flags (`loong.kernels.exchange.signals`), with epochs of the open batch.
  Opening a batch sets `clocks`, on the device, to its first epoch. So captured kernels that read a clock, and
  count from it, are valid for every batch.
"""

from functools import partial
from math import prod
from os import close as close_descriptor
from pathlib import Path

import torch
from torch import Tensor

from loong.core.errors import ClusterError, ConfigError
from loong.fabric.lanes import LEASE_LANES, Lane
from loong.fabric.memory.memory_server import MemoryServer, fetch_memory
from loong.fabric.memory.shared_memory import SharedMemory
from loong.fabric.traffic import Plane
from loong.fabric.world import World
from loong.kernels.exchange.signals import EPOCHS, Deadline

MAX_RANKS = 63  # as many as a number has bits
_ALIGNMENT = 256
_GRANULE = 2 << 20  # bytes; allocation unit of a GPU's driver
_NEVER = -1  # before every epoch
_NUM_OWN_CLOCKS = 2  # of collectives, and of decode steps


class Arena:
    """The memory of `rank`, and the addresses of all arenas.

    memory: uint8 [num_bytes], own. addresses: int64 [world size], on the device, including this rank's.
    clocks: int64 [2 + lanes of leases], on the device: of collectives, of decode steps, and of such lanes.
    opened: flags int64 [world size] in `memory`, one a rank.
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
        if world.size > MAX_RANKS:
            raise ConfigError(
                f"arenas are for {MAX_RANKS} processes, but there are {world.size}; use --fabric nccl"
            )
        self.world, self.rank = world, rank
        self._directory, self._shared, self._deadline = directory, shared, deadline
        self._num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        self._num_reserved = 0
        self.memory, self._descriptor = shared.make(self._num_bytes)
        new = partial(torch.full, dtype=torch.int64, device=self.memory.device)
        self.addresses, self.clocks = new((world.size,), 0), new((_NUM_OWN_CLOCKS + len(LEASE_LANES),), 0)
        self.host_addresses = [0] * world.size  # equal to `addresses`, on the host
        self._learn(rank, self.memory.data_ptr())
        stop, words = new((len(Lane), 1), _NEVER), shared.words(2 * len(Lane), _NEVER).view(len(Lane), 2)
        limit = round(deadline * 1e9)
        self._deadlines = [Deadline(words[lane], stop[lane], limit) for lane in Lane]
        self._words = words.numpy()  # the same memory, faster to read than through torch
        self._openings = [self.reserve(8 * world.size) for _ in Plane]  # offsets of flags, one a rank
        self._memory_server = MemoryServer(self._memory_path_of(rank), self._descriptor, self._num_bytes)

    @property
    def opened(self) -> Tensor:
        """Flags [world size]: the first epoch of the last batch that each rank has opened with this one."""
        return self.view(self.opening_offset(Plane.BATCH), self.world.size, dtype=torch.int64)

    @property
    def own_clocks(self) -> Tensor:
        """The clocks [2] of the open batch: of collectives, and of decode steps."""
        return self.clocks[:_NUM_OWN_CLOCKS]

    def clock(self, lane: Lane) -> Tensor:
        """Return the clock [1] of captured decode steps in a lane: of this instance's batch, or of a lease
        that it serves.
        """
        place = _NUM_OWN_CLOCKS + LEASE_LANES.index(lane) if lane.is_captured else _NUM_OWN_CLOCKS - 1
        return self.clocks[place : place + 1]

    def opening_offset(self, plane: Plane) -> int:
        """Return the offset of flags [world size]: as `opened`, for the batches or migrations of a plane.

        A peer is in one batch at a time. So the lanes of a plane, which have other peers, share its flags.
        """
        return self._openings[plane]

    def deadline(self, lane: Lane = Lane.BATCH) -> Deadline:
        """Return the deadline of a lane's waits."""
        return self._deadlines[lane]

    def gave_up(self, lane: Lane, epoch: int) -> bool:
        """Return whether a wait has failed since `epoch`. The device is asked only if one may have."""
        return bool(self._words[lane, 0] >= epoch) and bool(self._deadlines[lane].stop >= epoch)

    def forget_failures(self, lane: Lane) -> None:
        """Let later waits of a lane be for any epochs, after failed ones; none is in flight."""
        self._words[lane] = _NEVER
        self._deadlines[lane].stop.fill_(_NEVER)

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of reserved space, filled with zeros.

        Raises ClusterError if the arena is too small.
        """
        offset = self._num_reserved
        self._num_reserved += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._num_reserved > self._num_bytes:
            raise ClusterError(f"an arena of {self._num_bytes} bytes has no room for {self._num_reserved}")
        return offset

    def view(self, offset: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a part of this process's memory as a tensor."""
        return self.memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def meet(self, rank: int) -> None:
        """Map the memory of a process that has joined, or joined again. Waits until it is available."""
        descriptor = fetch_memory(self._memory_path_of(rank), self._num_bytes, self._deadline)
        former = self.host_addresses[rank]
        self._learn(rank, self._shared.open(descriptor, self._num_bytes))
        close_descriptor(descriptor)
        if former:
            self._shared.close(former)

    def close(self) -> None:
        """Unmap the memory of the others, and stop serving our own."""
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
    """Return the epoch that marks a batch or a migration as open. Its other epochs follow."""
    return batch_or_migration_id * EPOCHS


def last_epoch(batch_or_migration_id: int) -> int:
    """Return the largest possible epoch of a batch or a migration."""
    return first_epoch(batch_or_migration_id + 1) - 1
