"""The numbering of processes: each is one tensor-parallel rank of one instance."""

from collections.abc import Iterable
from dataclasses import dataclass

from loong.fabric.errors import InvalidMessageError


@dataclass(frozen=True, slots=True)
class World:
    """All processes of a data plane: rank = instance_id * tp_size + tp_rank.

    `host_ids` has the host of each instance, and is empty where there is one host.
    """

    num_instances: int
    tp_size: int
    host_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.num_instances * self.tp_size

    def rank(self, instance_id: int, tp_rank: int) -> int:
        """Return the rank of one process."""
        return instance_id * self.tp_size + tp_rank

    def instance_id(self, rank: int) -> int:
        """Return the instance of `rank`."""
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        """Return the tensor-parallel rank of `rank` in its instance."""
        return rank % self.tp_size

    def place(self, rank: int) -> tuple[int, int]:
        """Return the instance of `rank`, and its tensor-parallel rank."""
        return self.instance_id(rank), self.tp_rank(rank)

    def ranks(self, instance_id: int) -> range:
        """Return the ranks of one instance."""
        return range(self.rank(instance_id, 0), self.rank(instance_id + 1, 0))

    def is_one_host(self, instance_ids: Iterable[int]) -> bool:
        """Return whether instances are on the same host."""
        return not self.host_ids or len({self.host_ids[i] for i in instance_ids}) < 2

    def share_host(self, rank: int, other: int) -> bool:
        """Return whether two processes are on the same host."""
        return self.is_one_host((self.instance_id(rank), self.instance_id(other)))

    def exchange_tensors(self, rank: int, other: int) -> bool:
        """Return whether processes are of one instance, or of equal tensor-parallel rank."""
        is_same_instance = self.instance_id(rank) == self.instance_id(other)
        return is_same_instance or self.tp_rank(rank) == self.tp_rank(other)

    def num_on_host(self, rank: int) -> int:
        """Return the number of processes on the host of `rank`."""
        return sum(self.share_host(rank, other) for other in range(self.size))

    def has_neighbors(self, rank: int) -> bool:
        """Return whether there is another instance on the host of `rank`."""
        return self.num_on_host(rank) > self.tp_size

    def index_on_host(self, rank: int) -> int:
        """Return the number of lower ranks on the host of `rank`."""
        return sum(self.share_host(rank, other) for other in range(rank))


def neighbours(ring: tuple[int, ...], instance_id: int) -> tuple[int, int]:
    """Return the next and the previous instance in a ring.

    Raises InvalidMessageError if it is not a member.
    """
    if instance_id not in ring:
        raise InvalidMessageError(f"instance {instance_id} is not in the ring {ring}")
    place = ring.index(instance_id)
    return ring[(place + 1) % len(ring)], ring[place - 1]
