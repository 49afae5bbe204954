"""KV of owners that goes to other instances, and requests that go from one copy of it to another."""

from collections.abc import Iterable

from loong.core.instructions import Instruction, MoveKV, ReleaseKV
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import KVMigration
from loong.core.positions import common, subtract
from loong.state.counts import Counts
from loong.state.live_request import LiveRequest
from loong.state.owners import GoneCause, KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.prefix_tree import PrefixTree


class Copies:
    """The migrations of what owners have, and the users that leave a copy for another.

    A source stays as it is while it is read by its migration and by others. KV that has arrived is one more
    copy. If the migration does not keep its source, that is retired then: it goes once nobody reads it.
    """

    def __init__(self, pools: PoolLedger, owners: PrefixTree, counts: Counts) -> None:
        self._pools, self._owners, self._counts = pools, owners, counts

    def pin(self, migration_id: int, migration: KVMigration) -> None:
        """Let a migration that is about to begin read its KV, if an owner has that."""
        if (owner := self._owners.by_id.get(migration.segment.owner_id)) is not None:
            before = owner.unread
            owner.pin(migration_id, migration.segment)
            self._owners.settle(owner, before)

    def open(self, migration_id: int, migration: KVMigration) -> MoveKV:
        """Begin a migration of KV that an owner has and that is pinned, with the room that it needs."""
        owner = self._owners.by_id[migration.segment.owner_id]
        owner.arriving[migration_id] = migration.arriving
        if not self._pools.serves(migration.segment.instance_id):
            self._owners.renew(owner)  # a request waits for it
        self._pools.reserve({migration.destination_id: len(migration.segment.positions)})
        windowless = common(owner.windowless, migration.segment.positions)
        return MoveKV(migration_id, migration, windowless=windowless)

    def close(self, migration_id: int, migration: KVMigration, *, is_committed: bool) -> list[KVOwner]:
        """End a migration. Return the owner if users are to leave some of its KV.

        Nothing arrives if the source was dropped meanwhile.
        """
        owner = self._owners.by_id[migration.segment.owner_id]
        before = owner.unread
        del owner.arriving[migration_id]
        is_void = migration_id not in owner.pinned
        if not is_void:
            owner.unpin(migration_id)
        if is_committed and not is_void:
            owner.add((migration.arriving,))
            self._owners.order(owner)
            self._retire_source(owner, migration)
            self._count(migration)
        else:
            self._drop(migration.arriving)
        self._owners.settle(owner, before)
        if is_committed and not is_void:
            self._empty_source(owner, migration)
        self._owners.drop_if_empty(owner)
        return [owner] if owner.retired.segments else []

    def lose(self, migration_id: int, migration: KVMigration, lost_id: InstanceId) -> None:
        """End a migration from or to an instance that is lost."""
        owner = self._owners.by_id[migration.segment.owner_id]
        before = owner.unread
        del owner.arriving[migration_id]
        if migration_id in owner.pinned:
            owner.unpin(migration_id)
        if migration.destination_id != lost_id:
            self._drop(migration.arriving)
        self._owners.settle(owner, before)
        self._owners.drop_if_empty(owner)

    def void_all(self) -> None:
        """Let no migration keep what it reads, or what it brings."""
        for owner in tuple(self._owners.by_id.values()):
            self._void(owner, tuple(owner.pinned))

    def distrust(self, owner: KVOwner, read: Placement) -> None:
        """Drop all copies of KV that may be wrong, unless others read them."""
        positions = [segment.positions for segment in read.segments]
        copied = [n for n, source in owner.pinned.items() if common((source.positions,), *positions)]
        self._void(owner, copied)
        for segment in owner.unread.segments:
            for unsound in common((segment.positions,), *positions):
                self._owners.remove(owner, segment._replace(positions=unsound), GoneCause.UNSOUND)
        self._owners.drop_if_empty(owner)

    def retire_on(self, instance_id: InstanceId) -> list[KVOwner]:
        """Retire what is on an instance, if another keeps a copy. Return the owners."""
        owners = [owner for owner in self._owners.on(instance_id) if owner.has_copies]
        for owner in owners:
            for positions in owner.placement.on(instance_id):
                self._retire(owner, KVSegment(owner.owner_id, positions, instance_id))
            self._owners.see(owner)
        return owners

    def leave_retired(self, live: LiveRequest) -> list[Instruction]:
        """Let a request that nothing in flight touches read other copies of KV that is retired."""
        instructions: list[Instruction] = []
        request_id = live.request.request_id
        for owner in [owner for owner in live.borrowed if owner.retired.segments]:
            leaving = self._switch(live, owner, owner.retired.segments)
            self._owners.end_use(owner, request_id, leaving)
            instructions += [ReleaseKV(request_id, (s.instance_id,), s.positions) for s in leaving]
        return instructions

    def leave_lost(self, live: LiveRequest, instance_id: InstanceId) -> None:
        """Let a request read other copies of what is lost with an instance."""
        for owner in live.borrowed:
            lost = [s for s in owner.placement.segments if s.instance_id == instance_id]
            if owner.has_copies and lost:
                self._switch(live, owner, lost)

    def _switch(self, live: LiveRequest, owner: KVOwner, leaving: Iterable[KVSegment]) -> list[KVSegment]:
        """Let a request read other copies, too, of what it reads of `leaving`; return what has one."""
        request_id = live.request.request_id
        left, joined = list[KVSegment](), list[KVSegment]()
        for segment in leaving:
            read = common((segment.positions,), *owner.read_by(request_id).on(segment.instance_id))
            read = common(read, *live.placement.on(segment.instance_id))
            for copy in self._serving(owner, segment):
                met = common(read, copy.positions)
                read = subtract(read, *met)
                joined += [copy._replace(positions=positions) for positions in met]
                left += [segment._replace(positions=positions) for positions in met]
        if joined:
            self._owners.lend(owner, request_id, joined)
            for segment in left:
                live.placement = live.placement.removing(segment._replace(owner_id=request_id))
            live.placement = live.placement.adding([s._replace(owner_id=request_id) for s in joined])
            self._counts.add(num_switched_tokens=sum(len(segment.positions) for segment in joined))
        return left

    def _serving(self, owner: KVOwner, segment: KVSegment) -> list[KVSegment]:
        """Return copies of some KV that requests can read, those that stay there first."""
        copies = [copy for copy in owner.elsewhere(segment) if self._pools.serves(copy.instance_id)]
        return sorted(copies, key=lambda copy: not self._pools.keeps(copy.instance_id))

    def _retire_source(self, owner: KVOwner, migration: KVMigration) -> None:
        if not migration.keeps_source or not self._pools.keeps(migration.segment.instance_id):
            self._retire(owner, migration.segment)

    def _empty_source(self, owner: KVOwner, migration: KVMigration) -> None:
        """Drop the source of KV that has moved to a host tier, except what is read there."""
        segment = migration.segment
        if not (migration.keeps_source or self._pools.serves(migration.destination_id)):
            for positions in common((segment.positions,), *owner.unread.on(segment.instance_id)):
                self._owners.remove(owner, segment._replace(positions=positions))

    def _retire(self, owner: KVOwner, segment: KVSegment) -> None:
        others = [copy for copy in self._serving(owner, segment) if self._pools.keeps(copy.instance_id)]
        alone = subtract((segment.positions,), *[copy.positions for copy in others])
        for positions in subtract((segment.positions,), *alone):
            owner.retire(segment._replace(positions=positions))

    def _void(self, owner: KVOwner, migration_ids: Iterable[int]) -> None:
        for migration_id in migration_ids:
            before = owner.unread
            owner.unpin(migration_id)
            self._owners.settle(owner, before)

    def _drop(self, arriving: KVSegment) -> None:
        self._pools.release({arriving.instance_id: len(arriving.positions)})
        self._owners.instruct(ReleaseKV(arriving.owner_id, (arriving.instance_id,), arriving.positions))

    def _count(self, migration: KVMigration) -> None:
        num_tokens = len(migration.segment.positions)
        if not self._pools.serves(migration.destination_id):
            self._counts.add(num_offloaded_tokens=num_tokens)
        elif not self._pools.serves(migration.segment.instance_id):
            self._counts.add(num_loaded_tokens=num_tokens)
        elif migration.keeps_source:
            self._counts.add(num_copied_tokens=num_tokens)
        else:
            self._counts.add(num_migrated_tokens=num_tokens)
