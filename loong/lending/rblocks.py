"""rBlocks of DistKV-LLM: blocks of KV of fixed size, in the memory of a device or of its host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loong.core.errors import LoongError
from loong.core.placement import InstanceId
from loong.core.request import RequestId


class RoomError(LoongError):
    """A pool is asked for room or blocks that it does not have."""


class Memory(StrEnum):
    """The memory that a block is in."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BlockRoom:
    """The room of one block: its physical place."""

    instance_id: InstanceId
    memory: Memory
    physical_id: int


@dataclass(frozen=True, slots=True)
class RBlock:
    """Block number `index` of a request's KV, and where it is."""

    request_id: RequestId
    index: int
    room: BlockRoom


class RBlockPool:
    """The room of one instance: what is free, and the blocks in what is not, except where it is reserved."""

    def __init__(self, instance_id: InstanceId, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        self.instance_id = instance_id
        self.capacity = num_device_blocks + num_host_blocks
        self._free = {
            Memory.DEVICE: [BlockRoom(instance_id, Memory.DEVICE, i) for i in range(num_device_blocks)],
            Memory.HOST: [BlockRoom(instance_id, Memory.HOST, i) for i in range(num_host_blocks)],
        }
        self._blocks: dict[RequestId, dict[int, RBlock]] = {}

    @property
    def num_free(self) -> int:
        """Return the free blocks of device and host."""
        return sum(map(len, self._free.values()))

    @property
    def num_used(self) -> int:
        """Return the blocks that hold KV."""
        return sum(map(len, self._blocks.values()))

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the requests that have blocks here."""
        return tuple(self._blocks)

    def count(self, request_id: RequestId) -> int:
        """Return the number of blocks of a request here."""
        return len(self._blocks.get(request_id, ()))

    def indexes_of(self, request_id: RequestId) -> Sequence[int]:
        """Return the blocks of a request here, ascending."""
        return sorted(self._blocks.get(request_id, ()))

    def blocks_of(self, request_id: RequestId) -> tuple[RBlock, ...]:
        """Return the blocks of a request here."""
        return tuple(self._blocks.get(request_id, {}).values())

    def reserve(self, num_blocks: int, *, may_use_host: bool) -> tuple[BlockRoom, ...] | None:
        """Take room of the device, and then of its host if that may be used. None if there is too little."""
        memories = tuple(Memory) if may_use_host else (Memory.DEVICE,)
        if num_blocks > sum(len(self._free[memory]) for memory in memories):
            return None
        found = list[BlockRoom]()
        for memory in memories:
            free = self._free[memory]
            while free and len(found) < num_blocks:
                found.append(free.pop())
        return tuple(found)

    def cancel(self, rooms: Iterable[BlockRoom]) -> None:
        """Free reserved room."""
        for room in rooms:
            self._free[room.memory].append(room)

    def fill(self, request_id: RequestId, indexes: Sequence[int], rooms: Sequence[BlockRoom]) -> None:
        """Put blocks of a request into reserved room. Raises `RoomError` if one of them is here already."""
        if not indexes:
            return
        blocks = self._blocks.setdefault(request_id, {})
        if len(indexes) != len(rooms) or not blocks.keys().isdisjoint(indexes):
            raise RoomError(
                f"instance {self.instance_id} is to keep blocks {indexes} of request {request_id} in "
                f"{len(rooms)} rooms, and has {sorted(blocks)} of it"
            )
        blocks.update({i: RBlock(request_id, i, room) for i, room in zip(indexes, rooms, strict=True)})

    def free(self, request_id: RequestId, indexes: Iterable[int]) -> None:
        """Free blocks of a request. Raises `RoomError` if one of them is not here."""
        blocks = self._blocks.get(request_id, {})
        for index in indexes:
            if index not in blocks:
                raise RoomError(f"instance {self.instance_id} has no block {index} of request {request_id}")
            self.cancel([blocks.pop(index).room])
        if not blocks:
            self._blocks.pop(request_id, None)

    def free_all(self, request_id: RequestId) -> None:
        """Free all blocks of a request here."""
        self.free(request_id, self.indexes_of(request_id))
