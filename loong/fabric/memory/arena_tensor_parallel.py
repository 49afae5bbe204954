"""Collectives inside one instance whose ranks share arenas. A captured one can be replayed in any batch."""

import torch
from torch import Tensor

from loong.fabric.memory.arena import Arena
from loong.fabric.traffic import Channel, Traffic
from loong.kernels.exchange.reduce import Inbox, all_gather, all_reduce, inbox_bytes

_WHOLE_PARTS = 8  # of 16 MiB: above 2 MiB a second round costs less than the traffic that it saves


class ArenaTensorParallel:
    """Implements TensorParallelVerbs, together with the other ranks of the instance, inside a batch."""

    def __init__(self, arena: Arena, shard_bytes: int, traffic: Traffic) -> None:
        world = arena.world
        self.rank, self.size = world.tp_rank(arena.rank), world.tp_size
        self._traffic = traffic
        shards, flags = map(arena.reserve, inbox_bytes(self.size, shard_bytes))
        self._inbox = Inbox(
            memory=arena.memory,
            addresses=arena.addresses,
            opened=arena.opened,
            clock=arena.own_clocks[:1],
            num_done=torch.zeros(1, dtype=torch.int32, device=arena.memory.device),
            deadline=arena.deadline(),
            shards=shards,
            shard_bytes=shard_bytes,
            whole_bytes=shard_bytes // _WHOLE_PARTS,
            flags=flags,
            first_rank=arena.rank - self.rank,
            rank=self.rank,
            size=self.size,
        )

    @staticmethod
    def num_bytes(size: int, shard_bytes: int) -> int:
        """Return enough bytes of an arena."""
        return sum(inbox_bytes(size, shard_bytes)) + 1024

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TensorParallelVerbs; x is floating."""
        self._count(x)
        return all_reduce(x, self._inbox) if self.size > 1 else x

    def all_gather(self, x: Tensor) -> Tensor:
        """See TensorParallelVerbs."""
        self._count(x)
        return all_gather(x, self._inbox) if self.size > 1 else x

    def _count(self, x: Tensor) -> None:
        for _ in range(self.size - 1):
            self._traffic.count(Channel.TENSOR_PARALLEL, x.nbytes)
