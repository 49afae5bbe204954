"""Owners of KV that are no live requests: what several requests read in the same slots, or may read again."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loong.core.placement import InstanceId, KVSegment, OwnerId, OwnerView, Placement
from loong.core.positions import coalesce, common, first_overlap, subtract
from loong.core.request import RequestId, TokenId

MAX_GONE = 16  # records of an owner; the oldest are forgotten


class GoneCause(Enum):
    """The reason why KV that nobody read is gone."""

    EVICTED = auto()  # others needed its room
    RESET = auto()
    LOST = auto()  # with its instance
    DRAINED = auto()  # its instance was to leave
    UNSOUND = auto()  # the request that computed it failed


class Gone(NamedTuple):
    """Positions whose KV on an instance is gone since a time, in the clock of events."""

    positions: range
    instance_id: InstanceId
    cause: GoneCause
    time: float


class KVOwner:
    """Keys and values of some positions of a sequence of tokens, and the KV that each user reads.

    It is a node of a tree: `token_ids` are those from position `start` on, `parent` has those before. A child
    is known by its first position and its first token, with which no other continues there. `followers` are
    the live requests that have its first token.

    A position may have KV on several instances. A user reads one of these copies. A migration reads its
    source, which is `pinned`, and fills the slots of KV that is `arriving`. What nobody reads is `unread`: it
    may be evicted, and goes at once unless the owner `is_kept`. KV that is `retired` has another copy, to
    which its users go at their next boundary. `windowless` positions have no KV in layers with a window any
    more. `has_changed` is set when its KV changes, or what its users share. `gone` are records of KV that it
    had, the latest last. Nothing but reasons follows from them.
    """

    def __init__(
        self, owner_id: OwnerId, start: int, token_ids: NDArray[np.int32], *, is_kept: bool = True
    ) -> None:
        self.owner_id, self.start, self.token_ids, self.is_kept = owner_id, start, token_ids, is_kept
        self.parent: KVOwner | None = None
        self.children: dict[tuple[int, TokenId], KVOwner] = {}
        self.followers: set[RequestId] = set()
        self.placement = Placement()
        self.users: dict[RequestId, tuple[KVSegment, ...]] = {}
        self.pinned: dict[int, KVSegment] = {}  # by migration
        self.arriving: dict[int, KVSegment] = {}
        self.retired = Placement()
        self.unread = Placement()
        self.has_copies = False
        self.windowless: tuple[range, ...] = ()
        self.gone: tuple[Gone, ...] = ()
        self.uses: list[int] = []  # the stops up to which it was used, the latest use first
        self.has_changed = False
        self._authors: list[tuple[int, RequestId]] = []  # from a position on, ascending
        self._authored_until = start
        self._num_readers: Counter[KVSegment] = Counter()
        # Of users that have asked since the last change
        self._read_by: dict[RequestId, Placement] = {}
        self._shared: dict[RequestId, Placement] = {}

    @property
    def stop(self) -> int:
        """Return the position after its last token."""
        return self.start + len(self.token_ids)

    def follow(self, request_id: RequestId) -> None:
        """Note a live request that has its first token, and maybe new ones at its end."""
        self.followers.add(request_id)
        if not self._authors or self.stop > self._authored_until:
            self._authors.append((self._authored_until, request_id))
            self._authored_until = self.stop

    def author_at(self, position: int) -> RequestId | None:
        """Return the request that was the first to have the token at a position; None if none is known."""
        index = bisect_right(self._authors, position, key=itemgetter(0))
        return self._authors[index - 1][1] if index else None

    @property
    def root(self) -> "KVOwner":
        """Return the owner before all tokens, which has none."""
        owner = self
        while owner.parent is not None:
            owner = owner.parent
        return owner

    @property
    def is_empty(self) -> bool:
        """Return whether it has nothing, and nothing names it."""
        named_by = self.users or self.children or self.followers or self.arriving
        return not (self.placement.segments or named_by)

    def attach(self, child: "KVOwner") -> None:
        """Add an owner of tokens that continue those below its first position."""
        child.parent = self
        self.children[child.start, int(child.token_ids[0])] = child

    def detach(self) -> "KVOwner":
        """Leave the parent, which it has, and return it."""
        assert self.parent is not None, "roots are not detached"
        parent, self.parent = self.parent, None
        del parent.children[self.start, int(self.token_ids[0])]
        return parent

    def num_matching(self, token_ids: NDArray[np.int32], first: int) -> int:
        """Return the number of its tokens that are those of a sequence from position `first` on."""
        own = self.token_ids[first - self.start :]
        most = min(len(own), len(token_ids) - first)
        different = own[:most] != token_ids[first : first + most]
        place = int(different.argmax()) if most else 0
        return place if most and different[place] else most

    def view(self) -> OwnerView:
        """Return its KV as policies see it."""
        return OwnerView(self.owner_id, self.placement, self.unread, self.retired)

    def add(self, segments: Iterable[KVSegment]) -> None:
        """Take KV that it does not have on the same instances."""
        self._hold(self.placement.adding([KVSegment(self.owner_id, p, i) for _, p, i in segments]))

    def remove(self, segment: KVSegment) -> None:
        """Drop KV that nobody reads."""
        self._hold(self.placement.removing(segment))

    def lend(self, user_id: RequestId, segments: Iterable[KVSegment]) -> None:
        """Let a request read this KV, too. It reads these positions nowhere else."""
        new = [KVSegment(self.owner_id, positions, i) for _, positions, i in segments]
        self._read(user_id, (*self.users.get(user_id, ()), *new))

    def read_by(self, user_id: RequestId) -> Placement:
        """Return the KV that a user reads here, as KV of the user."""
        if (known := self._read_by.get(user_id)) is None:
            known = self._read_by[user_id] = _placed(user_id, self.users[user_id])
        return known

    def shared_with(self, user_id: RequestId) -> Placement:
        """Return the same without what no one else reads."""
        if (known := self._shared.get(user_id)) is None:
            readers, own = self._num_readers, self.users[user_id]
            if len(self.users) == 1 and not self.pinned:
                others: list[KVSegment] = []
            else:
                others = [segment for segment, count in readers.items() if count > own.count(segment)]
            known = self._shared[user_id] = _placed(user_id, tuple(_met(own, others)))
        return known

    def give_back(self, user_id: RequestId, segments: Iterable[KVSegment]) -> Counter[InstanceId]:
        """End a user's use of `segments`, as far as it reads them here; return the slots that it read."""
        ended: Counter[InstanceId] = Counter()
        left = self.users[user_id]
        for segment in segments:
            read = tuple(_met(left, (segment,)))
            left = tuple(_without(left, read))
            ended[segment.instance_id] += sum(len(one.positions) for one in read)
        self._read(user_id, left)
        return ended

    def leave(self, user_id: RequestId) -> Placement:
        """Remove a user; return what it read."""
        read = self.read_by(user_id)
        self._read(user_id, ())
        del self.users[user_id]
        return read

    def pin(self, migration_id: int, segment: KVSegment) -> None:
        """Let a migration read KV."""
        self.pinned[migration_id] = segment
        self._count((segment,), ())

    def unpin(self, migration_id: int) -> None:
        """End that."""
        self._count((), (self.pinned.pop(migration_id),))

    def retire(self, segment: KVSegment) -> None:
        """Let users go from some KV, of which there is another copy, as they can."""
        here = common((segment.positions,), *self.placement.on(segment.instance_id))
        new = subtract(here, *self.retired.on(segment.instance_id))
        self.retired = self.retired.adding([segment._replace(positions=positions) for positions in new])
        self.has_changed = True

    def elsewhere(self, segment: KVSegment) -> list[KVSegment]:
        """Return the copies of some KV on other instances that stay, in the order of the instances."""
        return [
            KVSegment(self.owner_id, met, instance_id)
            for instance_id in self.placement.instance_ids
            if instance_id != segment.instance_id
            for here in self.staying_on(instance_id)
            for met in common((segment.positions,), here)
        ]

    def staying_on(self, instance_id: InstanceId) -> tuple[range, ...]:
        """Return the positions that are on an instance, and not retired there."""
        here = self.placement.on(instance_id)
        return subtract(here, *self.retired.on(instance_id)) if self.retired.segments else here

    def coming_to(self, instance_id: InstanceId) -> list[range]:
        """Return the positions that an instance has, or will have."""
        arriving = [s.positions for s in self.arriving.values() if s.instance_id == instance_id]
        return [*self.placement.on(instance_id), *arriving]

    def all_positions(self) -> list[range]:
        """Return the positions that it has, or will have, on all instances; those with copies are twice."""
        return [segment.positions for segment in (*self.placement.segments, *self.arriving.values())]

    def forget_windowless(self) -> None:
        """Forget which positions have no KV in layers with a window where they have none at all."""
        if gone := subtract(self.windowless, *self.all_positions()):
            self.windowless = subtract(self.windowless, *gone)
            self.has_changed = True

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance, which is missing for all users then."""
        for user_id, read in tuple(self.users.items()):
            self._read(user_id, tuple([segment for segment in read if segment.instance_id != instance_id]))
        self._hold(self.placement.without(instance_id))

    @property
    def is_whole(self) -> bool:
        """Return whether it has the KV of all its tokens, each on one instance, where it stays."""
        is_simple = not (self.has_copies or self.retired.segments)
        return is_simple and self.placement.num_tokens == len(self.token_ids)

    def num_unread_tokens(self) -> Mapping[InstanceId, int]:
        """Return the number of tokens on each instance that nobody reads."""
        return self.unread.tokens_by_instance()

    def record(self, new: Gone) -> None:
        """Note what is to go, together with the last record if it comes just before that."""
        if self.gone and (last := self.gone[-1])[1:3] == new[1:3]:
            together = coalesce((new.positions, last.positions))
            if len(together) == 1:
                self.gone = (*self.gone[:-1], new._replace(positions=together[0]))
                return
        self.gone = (*self.gone[-MAX_GONE + 1 :], new)

    def _hold(self, placement: Placement) -> None:
        self.placement, self.has_changed = placement, True
        held = [segment.positions for segment in placement.segments]
        self.has_copies = len(placement.instance_ids) > 1 and first_overlap(held) is not None
        if self.retired.segments:
            self.retired = Placement(tuple([copy for s in self.retired.segments for copy in self._copied(s)]))
        self._shared.clear()
        self._find_unread()

    def _copied(self, segment: KVSegment) -> list[KVSegment]:
        """Return the parts of some KV that are there, and on other instances too."""
        here = common((segment.positions,), *self.placement.on(segment.instance_id))
        others = [copy.positions for copy in self.elsewhere(segment)]
        alone = subtract(here, *others)
        return [segment._replace(positions=positions) for positions in subtract(here, *alone)]

    def _read(self, user_id: RequestId, segments: tuple[KVSegment, ...]) -> None:
        """Let a user read just this KV."""
        before, self.users[user_id] = self.users.get(user_id, ()), segments
        self._shared.pop(user_id, None)
        self._read_by.pop(user_id, None)
        if before and segments:
            self._count(set(segments).difference(before), set(before).difference(segments))
        else:
            self._count(segments, before)

    def _count(self, new: Iterable[KVSegment], ended: Iterable[KVSegment]) -> None:
        """Count a reader of some KV, and one less of other.

        Other users share the same as before if each segment that changes has two more readers at least.
        """
        fewest, readers = 2, self._num_readers
        for segment in new:
            before = readers.get(segment, 0)
            fewest = min(fewest, before)
            readers[segment] = before + 1
        for segment in ended:
            left = readers.pop(segment) - 1
            fewest = min(fewest, left)
            if left:
                readers[segment] = left
        if fewest < 2:
            self._shared.clear()
            self.has_changed = True
        if fewest < 1:
            self._find_unread()

    def _find_unread(self) -> None:
        readers, held = self._num_readers, self.placement.segments
        if not readers:
            self.unread = self.placement
            return
        rest = [segment for segment in held if segment not in readers]
        if len(held) - len(rest) < len(readers):  # some are read in part
            rest = [*_without(rest, readers)]
        self.unread = Placement(tuple(rest))


def _met(segments: Iterable[KVSegment], others: Iterable[KVSegment]) -> Iterator[KVSegment]:
    """Yield the parts of segments whose positions some others have on the same instance."""
    by_instance = _by_instance(others)
    for segment in segments if by_instance else ():
        there = by_instance.get(segment.instance_id, ())
        if segment.positions in there:
            yield segment
        elif there:
            left = subtract((segment.positions,), *there)
            for positions in subtract((segment.positions,), *left):
                yield segment._replace(positions=positions)


def _without(segments: Iterable[KVSegment], others: Iterable[KVSegment]) -> Iterator[KVSegment]:
    """Yield the parts of segments whose positions no others have on the same instance."""
    by_instance = _by_instance(others)
    for segment in segments:
        for positions in subtract((segment.positions,), *by_instance.get(segment.instance_id, ())):
            yield segment._replace(positions=positions)


def _by_instance(segments: Iterable[KVSegment]) -> dict[InstanceId, list[range]]:
    found: dict[InstanceId, list[range]] = {}
    for _, positions, instance_id in segments:
        found.setdefault(instance_id, []).append(positions)
    return found


def _placed(owner_id: OwnerId, segments: Sequence[KVSegment]) -> Placement:
    if len({instance_id for _, _, instance_id in segments}) == len(segments):
        return Placement(tuple([KVSegment(owner_id, p, i) for _, p, i in segments if p]))
    by_instance = _by_instance(segments)
    placed = ([KVSegment(owner_id, p, i) for p in coalesce(ranges)] for i, ranges in by_instance.items())
    return Placement(tuple(chain.from_iterable(placed)))
