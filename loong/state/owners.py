"""Owners of KV that are no live requests: what several requests read in the same slots."""

from collections import Counter
from collections.abc import Iterable

from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement
from loong.core.positions import common, subtract
from loong.core.request import RequestId


class KVOwner:
    """Keys and values that belong to no live request, and the positions of them that each user reads.

    A slot is free once no user reads it.
    """

    def __init__(self, owner_id: OwnerId, placement: Placement) -> None:
        self.owner_id = owner_id
        self.placement = placement.of(owner_id)
        self.users: dict[RequestId, tuple[range, ...]] = {}
        self._shared: dict[RequestId, Placement] = {}  # of users that have asked since the last change

    def lend(self, user_id: RequestId, positions: tuple[range, ...]) -> None:
        """Let a request read these positions, of which it has no other KV."""
        self.users[user_id] = positions
        self._shared.clear()

    def read_by(self, user_id: RequestId) -> Placement:
        """Return the KV that a user reads here, as KV of the user."""
        return self._placed(user_id, self.users[user_id])

    def shared_with(self, user_id: RequestId) -> Placement:
        """Return the same without what no other user reads."""
        if (known := self._shared.get(user_id)) is None:
            read = self.users[user_id]
            alone = subtract(read, *self._read_by_any(self.users.keys() - {user_id}))
            known = self._shared[user_id] = self._placed(user_id, subtract(read, *alone))
        return known

    def give_back(self, user_id: RequestId, segments: Iterable[KVSegment]) -> Counter[InstanceId]:
        """End a user's use of `segments`, as far as it reads them here; return the slots that stay in use."""
        staying: Counter[InstanceId] = Counter()
        for segment in segments:
            read = common(
                self.users[user_id], *common((segment.positions,), *self.placement.on(segment.instance_id))
            )
            self.users[user_id] = subtract(self.users[user_id], *read)
            unread = subtract(read, *self._read_by_any(self.users))
            for positions in unread:
                self.placement = self.placement.removing(
                    KVSegment(self.owner_id, positions, segment.instance_id)
                )
            staying[segment.instance_id] += sum(map(len, read)) - sum(map(len, unread))
        self._shared.clear()
        return staying

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance, which is missing for all users then."""
        lost, self.placement = self.placement.on(instance_id), self.placement.without(instance_id)
        self.users = {user_id: subtract(read, *lost) for user_id, read in self.users.items()}
        self._shared.clear()

    def _read_by_any(self, user_ids: Iterable[RequestId]) -> set[range]:
        return {positions for user_id in user_ids for positions in self.users[user_id]}

    def _placed(self, user_id: RequestId, positions: tuple[range, ...]) -> Placement:
        return Placement(
            tuple(
                KVSegment(user_id, part, segment.instance_id)
                for segment in self.placement.segments
                for part in common((segment.positions,), *positions)
            )
        )


class KVOwners:
    """All of these owners, by id."""

    def __init__(self) -> None:
        self.by_id: dict[OwnerId, KVOwner] = {}
        self._num_made = 0

    def make(self, placement: Placement) -> KVOwner:
        """Return a new owner of KV, without users."""
        self._num_made += 1
        owner = KVOwner(f"kv-{self._num_made}", placement)
        self.by_id[owner.owner_id] = owner
        return owner

    def leave(self, user_id: RequestId, owners: Iterable[KVOwner]) -> None:
        """Remove a user that reads nothing any more, and the owners that have no other user."""
        for owner in owners:
            del owner.users[user_id]
            if not owner.users:
                del self.by_id[owner.owner_id]

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance."""
        for owner in self.by_id.values():
            owner.lose(instance_id)
