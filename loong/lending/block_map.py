"""The block map of an engine: the place of each block of its requests, and the blocks of others here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.messages import RequestPlacementEntry
from loong.lending.rblocks import RBlockPool, RoomError
from loong.lending.reporting import Key, Reporting


@dataclass(slots=True)
class HomeRequest:
    """A request at home on an instance: blocks 0 to `num_blocks` - 1.

    Those in `remote` are on other instances, those in `missing` were lost with one. All others are at home.
    """

    home_id: InstanceId
    num_blocks: int = 0
    remote: dict[int, InstanceId] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)


class BlockMap:
    """The pools of an engine's instances, and what is in them. Each change is noted for the next heartbeat.

    The map of a request at its home decides who owns a block. It changes at once when a move is confirmed.
    """

    def __init__(self, pools: Mapping[InstanceId, RBlockPool], reporting: Reporting) -> None:
        self.pools = pools
        self.homes: dict[RequestId, HomeRequest] = {}
        self.hosted: dict[RequestId, InstanceId] = {}  # the home of each request of another instance
        self._reporting = reporting

    def allocate(self, request_id: RequestId, home_id: InstanceId, num_blocks: int) -> bool:
        """Take room at home for a request's next blocks. Return whether there is enough on its device."""
        request = self.homes.get(request_id, HomeRequest(home_id))
        if request.home_id != home_id or request_id in self.hosted:
            raise RoomError(f"request {request_id} is at home on instance {request.home_id}, not {home_id}")
        rooms = self.pools[home_id].reserve(num_blocks, may_use_host=False)
        if rooms is None:
            return False
        self.pools[home_id].fill(
            request_id, range(request.num_blocks, request.num_blocks + num_blocks), rooms
        )
        request.num_blocks += num_blocks
        self.homes[request_id] = request
        self._reporting.change([(request_id, home_id)])
        return True

    def restore(self, request_id: RequestId) -> bool:
        """Take room at home for blocks that were lost, to compute them again. Return whether there is any."""
        request = self.homes[request_id]
        rooms = self.pools[request.home_id].reserve(len(request.missing), may_use_host=False)
        if rooms is None:
            return False
        self.pools[request.home_id].fill(request_id, sorted(request.missing), rooms)
        request.missing.clear()
        self._reporting.change([(request_id, request.home_id)])
        return True

    def finish(self, request_id: RequestId) -> frozenset[InstanceId]:
        """Free what a request has at home, and return the instances that keep the others."""
        request = self.homes.pop(request_id)
        self.pools[request.home_id].free_all(request_id)
        self._reporting.change([(request_id, request.home_id)])
        return frozenset(request.remote.values())

    def is_home(self, request_id: RequestId, instance_id: InstanceId) -> bool:
        """Return whether a request is at home on an instance."""
        return request_id in self.homes and self.homes[request_id].home_id == instance_id

    def movable(self, request_id: RequestId, instance_id: InstanceId, moving: Iterable[int]) -> Sequence[int]:
        """Return the blocks of a request on an instance that may move, the oldest first.

        The newest block at home grows and stays there.
        """
        indexes = set(self.pools[instance_id].indexes_of(request_id)).difference(moving)
        if self.is_home(request_id, instance_id):
            indexes.discard(self.homes[request_id].num_blocks - 1)
        return sorted(indexes)

    def home_of(self, request_id: RequestId) -> InstanceId | None:
        """Return the home of a request that is known here, its own or one that has blocks here."""
        if request_id in self.homes:
            return self.homes[request_id].home_id
        return self.hosted.get(request_id)

    def moved_away(
        self, request_id: RequestId, indexes: Sequence[int], source_id: InstanceId, destination_id: InstanceId
    ) -> None:
        """Free blocks that their destination keeps from now on."""
        self.pools[source_id].free(request_id, indexes)
        if self.is_home(request_id, source_id):
            self.homes[request_id].remote.update(dict.fromkeys(indexes, destination_id))
        elif not any(request_id in pool.request_ids for pool in self.pools.values()):
            self.hosted.pop(request_id, None)
        self._reporting.change([(request_id, source_id)])

    def can_take(
        self, request_id: RequestId, indexes: Iterable[int], at_id: InstanceId, from_id: InstanceId
    ) -> bool:
        """Return whether blocks that arrive from an instance are what this engine's map lacks here."""
        if not set(indexes).isdisjoint(self.pools[at_id].indexes_of(request_id)):
            return False
        if not self.is_home(request_id, at_id):
            return self.hosted.get(request_id, from_id) == from_id
        remote = self.homes[request_id].remote
        return all(remote.get(index) == from_id for index in indexes)

    def took(
        self, request_id: RequestId, indexes: Iterable[int], at_id: InstanceId, from_id: InstanceId
    ) -> None:
        """Note blocks that have arrived, in a pool that has them: a debt, or blocks that are home again."""
        if self.is_home(request_id, at_id):
            for index in indexes:
                del self.homes[request_id].remote[index]
        elif request_id not in self.homes:
            self.hosted[request_id] = from_id
        self._reporting.change([(request_id, at_id)])

    def release(self, request_id: RequestId) -> None:
        """Free what is kept here of a request of another instance."""
        self.hosted.pop(request_id, None)
        for instance_id, pool in self.pools.items():
            if request_id in pool.request_ids:
                pool.free_all(request_id)
                self._reporting.change([(request_id, instance_id)])

    def lost(self, instance_id: InstanceId) -> None:
        """Free what is kept for an instance that is lost. What it kept is missing."""
        for request_id in [r for r, home_id in self.hosted.items() if home_id == instance_id]:
            self.release(request_id)
        for request in self.homes.values():
            gone = {index for index, place in request.remote.items() if place == instance_id}
            request.missing |= gone
            request.remote = {i: place for i, place in request.remote.items() if i not in gone}

    @property
    def keys(self) -> list[Key]:
        """Return the key of every entry."""
        return [(request_id, i) for i, pool in self.pools.items() for request_id in pool.request_ids]

    def entry(self, key: Key) -> RequestPlacementEntry:
        """Return an entry as it is now; it has 0 blocks if there are none any more."""
        request_id, instance_id = key
        num_blocks = self.pools[instance_id].count(request_id)
        return RequestPlacementEntry(
            request_id, instance_id, num_blocks, self.is_home(request_id, instance_id)
        )
