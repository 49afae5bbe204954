"""The tree of all owners of KV that are no live requests: a request finds there what it need not compute."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loong.core.instructions import Instruction, ReleaseKV, ReleaseWindows, ShareKV
from loong.core.placement import CachedKV, InstanceId, KVSegment, OwnerId, OwnerView, Placement
from loong.core.positions import common, intersection, subtract
from loong.core.request import RequestId
from loong.state.eviction_order import EvictionOrder
from loong.state.owners import Gone, GoneCause, KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.remembered_owners import RememberedOwners

SALT = "salt-"  # before the salt's digest, in the names of roots


class PathPart(NamedTuple):
    """Some positions of a sequence of tokens, and the owner that has these tokens."""

    owner: KVOwner
    positions: range


Path: TypeAlias = tuple[PathPart, ...]


class PrefixTree:
    """Owners by id, and by what they begin with: no two with the same salt begin alike at the same place.

    `keeps` says whether KV stays that nobody reads. It does on instances that take new KV, until its room is
    needed: then copies that others keep longer go first, and what was used least recently, from its end.
    `changed` are the owners that have changed since `views` were last made, of the owners that live requests
    follow. `new` are owners, with positions, of which a host tier may lack KV, by that tier. `now` is the
    time of what happens next. If it `remembers`, some owners stay when all their KV is gone, so that there is
    a reason why they lack.
    """

    def __init__(self, pools: PoolLedger, *, keeps: bool, remembers: bool = False) -> None:
        self.by_id: dict[OwnerId, KVOwner] = {}
        self.changed: list[KVOwner] = []
        self.views: dict[OwnerId, OwnerView] = {}
        self.new: dict[InstanceId, list[tuple[KVOwner, range]]] = {}
        self.keeps, self.now = keeps, 0.0
        self.roots: dict[str, KVOwner] = {}  # by salt
        self.remembered = RememberedOwners(remembers=remembers)
        self._pools = pools
        self._order = EvictionOrder(pools.serves)
        self._instructions: list[Instruction] = []
        self._num_made = 0

    def take_instructions(self) -> tuple[Instruction, ...]:
        """Return the instructions that follow from changes since they were last taken."""
        taken, self._instructions = tuple(self._instructions), []
        return taken

    def instruct(self, instruction: Instruction) -> None:
        """Note an instruction that follows from a change."""
        self._instructions.append(instruction)

    def path(
        self, salt: str, token_ids: NDArray[np.int32], *, known: Path = (), is_kept: bool = True
    ) -> Path:
        """Return the owners of all tokens of a sequence, one after the other; those that lack are made.

        The path of its first tokens may be `known`: owners with followers keep their tokens. If they are not
        kept, none of their KV stays that nobody reads.
        """
        root = self.roots.get(salt)
        if root is None:
            is_kept = is_kept and self.keeps
            root = self.roots[salt] = KVOwner(salt, 0, np.empty(0, dtype=np.int32), is_kept=is_kept)
        parts = [*known]
        owner, first = root, 0
        if known:
            owner, covered = parts.pop()
            first = covered.stop + owner.num_matching(token_ids, covered.stop)
            parts.append(PathPart(owner, range(covered.start, first)))
        while first < len(token_ids):
            child = owner.children.get((first, int(token_ids[first])))
            if child is None:
                parts.append(self._extended(owner, first, token_ids))
                break
            stop = first + child.num_matching(token_ids, first)
            parts.append(PathPart(child, range(first, stop)))
            owner, first = child, stop
        return _joined(parts)

    def refresh_views(self) -> None:
        """Make the views of owners that have changed anew; a snapshot may still have the old ones."""
        if self.changed:
            self.views = self.views.copy()
            for owner in self.changed:
                if owner.followers and owner.placement.segments:
                    self.views[owner.owner_id] = owner.view()
                else:
                    self.views.pop(owner.owner_id, None)
            self.changed.clear()

    def follow(self, request_id: RequestId, path: Path) -> None:
        """Note that a live request has these tokens, so that their owners stay."""
        for owner, _ in path:
            if not owner.followers:
                self.changed.append(owner)
            owner.follow(request_id)
            self.remembered.discard(owner.owner_id)

    def unfollow(self, request_id: RequestId, path: Path) -> None:
        """End that. Owners without KV, children and live requests go."""
        for owner, _ in reversed(path):
            owner.followers.discard(request_id)
            if not owner.followers:
                self.changed.append(owner)
            self.drop_if_empty(owner)

    def give(self, owner: KVOwner, giver_id: RequestId, segments: Iterable[KVSegment]) -> bool:
        """Let an owner have KV of a request, which reads it there from now on; return whether it takes any.

        What the owner has on the same instance already, or will have, stays with the request alone.
        """
        given = self._take(owner, segments)
        if given:
            owner.lend(giver_id, given)
            self.see(owner)
        return bool(given)

    def keep(self, owner: KVOwner, segments: Iterable[KVSegment]) -> list[KVSegment]:
        """Let an owner have KV of a request that ends; return what it takes, which nobody reads now.

        The path of the request is touched next.
        """
        before = owner.unread
        given = self._take(owner, segments)
        self._count(owner, before)
        return given

    def _take(self, owner: KVOwner, segments: Iterable[KVSegment]) -> list[KVSegment]:
        there = (*owner.placement.segments, *owner.arriving.values())
        given = [
            segment._replace(positions=positions)
            for segment in segments
            for positions in subtract(
                (segment.positions,), *[s.positions for s in there if s.instance_id == segment.instance_id]
            )
        ]
        if given:
            owner.add(given)
            self.order(owner)
            self._instructions.append(ShareKV(owner.owner_id, tuple(given)))
        return given

    def lend(self, owner: KVOwner, user_id: RequestId, segments: Sequence[KVSegment]) -> None:
        """Let a request read KV of an owner."""
        before = owner.unread
        owner.lend(user_id, segments)
        self._instructions.append(ShareKV(user_id, tuple(segments)))
        self.settle(owner, before)

    def end_use(
        self, owner: KVOwner, user_id: RequestId, segments: Iterable[KVSegment]
    ) -> Mapping[InstanceId, int]:
        """End the use of some KV of an owner; return the slots that the user read."""
        before = owner.unread
        ended = owner.give_back(user_id, segments)
        self.settle(owner, before)
        return ended

    def leave(self, owner: KVOwner, user_id: RequestId) -> Placement:
        """Remove a user; return what it read."""
        before = owner.unread
        read = owner.leave(user_id)
        self.settle(owner, before)
        self.drop_if_empty(owner)
        return read

    def touch(self, path: Path) -> None:
        """Note that a sequence is used now; what it begins with counts as used after what follows."""
        for owner, positions in reversed(path):
            self._order.use(owner, positions.stop)

    def order(self, owner: KVOwner) -> None:
        """Put the uses of an owner last where it has new KV, and leave them as they are where it had some."""
        self._order.add(owner)

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance that is gone."""
        for owner in self.on(instance_id):
            for positions in owner.placement.on(instance_id):
                owner.record(Gone(positions, instance_id, GoneCause.LOST, self.now))
            owner.lose(instance_id)
            self.see(owner)
            self.drop_if_empty(owner)
        self._order.lose(instance_id)
        gone = (instance_id,)  # nothing is released where a move from a draining instance ends with it
        self._instructions = [
            i
            for i in self._instructions
            if not (isinstance(i, (ReleaseKV, ReleaseWindows)) and i.instance_ids == gone)
        ]

    def on(self, instance_id: InstanceId) -> list[KVOwner]:
        """Return the owners with KV on an instance."""
        return [owner for owner in self.by_id.values() if instance_id in owner.placement.instance_ids]

    def empty(self, instance_id: InstanceId, cause: GoneCause = GoneCause.RESET) -> None:
        """Evict all KV on an instance that nobody reads."""
        self._evict(instance_id, self._pools.instances[instance_id].kv_cached, cause)

    def make_room(self) -> None:
        """Evict as much as is needed for what is in use and reserved."""
        for instance in tuple(self._pools.instances.values()):
            if (num_missing := instance.kv_used + instance.kv_cached - instance.kv_capacity) > 0:
                self._evict(instance.instance_id, num_missing, GoneCause.EVICTED)

    def uses_on(self, instance_id: InstanceId) -> list[tuple[KVOwner, int]]:
        """See `EvictionOrder`."""
        return self._order.uses_on(instance_id)

    def find_new(self) -> None:
        """Find KV that host tiers lack, for the next snapshots."""
        self.new = {
            tier.instance_id: self._order.new(tier.tier_of, tier.instance_id)
            for tier in self._pools.instances.values()
            if tier.tier_of is not None and tier.tier_of in self._pools.free
        }

    def renew(self, owner: KVOwner) -> None:
        """Note that some KV of an owner is about to be used, with what comes before it."""
        before: KVOwner | None = owner
        while before is not None:
            self._order.renew(before)
            before = before.parent

    def remove(self, owner: KVOwner, segment: KVSegment, cause: GoneCause = GoneCause.EVICTED) -> None:
        """Evict some KV, which nobody reads."""
        owner.record(Gone(segment.positions, segment.instance_id, cause, self.now))
        owner.remove(segment)
        if segment.instance_id not in owner.placement.instance_ids:
            self._order.leave(owner, segment.instance_id)
        self.see(owner)
        self._pools.forget({segment.instance_id: len(segment.positions)})
        self.instruct(ReleaseKV(owner.owner_id, (segment.instance_id,), segment.positions))

    def settle(self, owner: KVOwner, before: Placement) -> None:
        """Count what nobody reads any more, or again; before that it was `before`. Evict what cannot stay."""
        self._count(owner, before)
        if owner.unread.stop > (owner.uses[-1] if owner.uses else 0):
            self.touch((PathPart(owner, range(owner.start, owner.stop)),))

    def see(self, owner: KVOwner) -> None:
        """Note that an owner has changed, if it has."""
        if owner.has_changed:
            owner.has_changed = False
            self.changed.append(owner)

    def drop_if_empty(self, owner: KVOwner) -> None:
        """Remove an owner that has nothing and that nothing names, and then those before it.

        It is only remembered at first, if it had KV for a request that comes later.
        """
        if owner.is_empty and owner.is_kept and owner.gone:
            self._order.forget(owner)
            self.remembered.add(owner)
        else:
            self._drop(owner)
        for oldest in self.remembered.forget_oldest():
            self._drop(oldest)

    def _count(self, owner: KVOwner, before: Placement) -> None:
        if owner.unread is not before:
            was, now = before.tokens_by_instance(), owner.unread.tokens_by_instance()
            self._pools.keep({i: now.get(i, 0) - was.get(i, 0) for i in {*was, *now}})
        self.see(owner)
        if owner.unread.segments:
            for segment in _leaving(owner, self._pools):
                self.remove(owner, segment, GoneCause.DRAINED)

    def _evict(self, instance_id: InstanceId, num_tokens: int, cause: GoneCause) -> None:
        """Evict copies that other instances keep longer, and then the rest."""
        for keeper_id in self._order.keepers(instance_id):
            num_tokens -= self._remove_all(self._order.copies(instance_id, keeper_id, num_tokens), cause)
        self._remove_all(self._order.first(instance_id, num_tokens), cause)

    def _remove_all(self, going: Iterable[tuple[KVOwner, KVSegment]], cause: GoneCause) -> int:
        """Evict KV that nobody reads; return the tokens."""
        num_tokens = 0
        for owner, segment in going:
            num_tokens += len(segment.positions)
            self.remove(owner, segment, cause)
            self.drop_if_empty(owner)
        return num_tokens

    def _extended(self, owner: KVOwner, first: int, token_ids: NDArray[np.int32]) -> PathPart:
        """Return the rest of a sequence, from position `first` on, which does not go on in `owner`."""
        rest = token_ids[first:].copy()
        if owner.parent is not None and first == owner.stop:
            owner.token_ids = np.concatenate([owner.token_ids, rest])
            return PathPart(owner, range(first, len(token_ids)))
        self._num_made += 1
        child = KVOwner(f"kv-{self._num_made}", first, rest, is_kept=owner.is_kept)
        self.by_id[child.owner_id] = child
        owner.attach(child)
        return PathPart(child, range(first, len(token_ids)))

    def _drop(self, owner: KVOwner) -> None:
        while owner.is_empty:
            if owner.parent is None:
                self.roots.pop(owner.owner_id, None)
                return
            self._order.forget(owner)
            self.by_id.pop(owner.owner_id, None)
            owner = owner.detach()


def _leaving(owner: KVOwner, pools: PoolLedger) -> Iterator[KVSegment]:
    """Yield what cannot stay where it is now that nobody reads it."""
    if owner.is_kept and not owner.retired.segments and pools.free.keys() >= {*owner.unread.instance_ids}:
        return  # these stay on instances that take new KV
    for segment in owner.unread.segments:
        here = segment.positions
        if owner.is_kept and pools.keeps(segment.instance_id):
            leaving = common((here,), *owner.retired.on(segment.instance_id))
        else:
            leaving = (here,)
        yield from (segment._replace(positions=positions) for positions in leaving)


def parts_within(path: Path, segments: Iterable[KVSegment]) -> Iterator[tuple[KVOwner, list[KVSegment]]]:
    """Yield each owner of a path with the parts of `segments` at its positions."""
    all_segments = tuple(segments)
    for owner, positions in path:
        within = [
            segment._replace(positions=met)
            for segment in all_segments
            for met in common((segment.positions,), positions)
        ]
        if within:
            yield owner, within


def cached_on(path: Path) -> tuple[CachedKV, ...]:
    """Return the KV of all tokens of a path but the last, whose logits are to be computed: all copies."""
    found: list[CachedKV] = []
    last = path[-1].positions.stop - 1
    for owner, positions in path:
        usable = range(positions.start, min(positions.stop, last))
        if owner.unread is owner.placement and not owner.retired.segments:  # most, and the rest costs more
            within = [(owner_id, intersection(p, usable), i) for owner_id, p, i in owner.placement.segments]
            found += [CachedKV(KVSegment(*part), is_read=False) for part in within if part[1]]
            continue
        for segment in owner.placement.segments:
            retired = owner.retired.on(segment.instance_id)
            unread = owner.unread.on(segment.instance_id)
            for met in subtract(common((segment.positions,), usable), *retired):
                rest = subtract((met,), *unread)
                found += [CachedKV(segment._replace(positions=p), is_read=True) for p in rest]
                alone = common((met,), *unread)
                found += [CachedKV(segment._replace(positions=p), is_read=False) for p in alone]
    return tuple(found)


def first_missing_on(path: Path, cached: Sequence[CachedKV] | None = None) -> tuple[OwnerId, int] | None:
    """Return the first position of a path without cached KV, the last left out, with its owner, if any."""
    last = path[-1].positions.stop - 1 if path else 0
    if cached is not None:
        missing = subtract((range(last),), *[part.segment.positions for part in cached])
        return owner_at(path, min([positions.start for positions in missing])) if missing else None
    for owner, positions in path:
        if owner.is_whole:
            continue
        held = [p for i in owner.placement.instance_ids for p in owner.staying_on(i)]
        missing = subtract((range(positions.start, min(positions.stop, last)),), *held)
        if any(missing):
            return owner.owner_id, min([positions.start for positions in missing if positions])
    return None


def owner_at(path: Path, position: int) -> tuple[OwnerId, int] | None:
    """Return a position with the owner of its token, or None if it is behind the path."""
    return next(((owner.owner_id, position) for owner, covered in path if position in covered), None)


def _joined(parts: Iterable[PathPart]) -> Path:
    """Return a path in which no owner comes twice in a row."""
    found: list[PathPart] = []
    for part in parts:
        if found and found[-1].owner is part.owner:
            part = PathPart(part.owner, range(found.pop().positions.start, part.positions.stop))
        found.append(part)
    return tuple(found)
