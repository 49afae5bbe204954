"""The prefix tree as live requests use it: they find KV of others there, and leave theirs."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from loong.core.placement import KVSegment
from loong.core.positions import at_or_after, before, coalesce, common, subtract
from loong.core.request import Request, RequestId
from loong.state.live_request import LiveRequest
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.prefix_tree import SALT, Path, PrefixTree, parts_within


class PrefixSharing:
    """The KV that live requests find at owners of a tree, and that they leave there.

    `lives` are all live requests by id.
    """

    def __init__(self, lives: Mapping[RequestId, LiveRequest], owners: PrefixTree, pools: PoolLedger) -> None:
        self._lives, self._owners, self._pools = lives, owners, pools

    def enter(self, live: LiveRequest) -> None:
        """Let a request that waits find KV of others, and them that of the request."""
        if self._is_cacheable(live.request):
            self._follow(live, live.known_tokens())
            for owner, _ in live.path:
                if len(owner.followers) == 2:  # more share all that they compute
                    for request_id in owner.followers:
                        self.share_new(self._lives[request_id])

    def share_new(self, live: LiveRequest) -> None:
        """Let others have what a request has computed of a prompt that begins like theirs."""
        if not live.has_unshared or live.ending_id is not None or live.has_ended:
            return
        shared = tuple([part for part in live.path if len(part.owner.followers) > 1])
        if shared:
            self.give(live, self._staying(live), shared)
            live.has_unshared = False

    def keep(self, live: LiveRequest) -> list[KVSegment]:
        """Let others have the KV of all known tokens but the last, on instances that take new KV.

        Return what they have now instead of the request, which is to drop all of its KV.
        """
        taken = list[KVSegment]()
        if not self._may_keep(live) or not live.placement.segments:
            return taken
        known = live.known_tokens()[:-1]
        self._follow(live, known)
        kept = [
            segment._replace(positions=positions)
            for segment in self._staying(live)
            for positions in common((segment.positions,), range(len(known)))
        ]
        for owner, given in self._given(live, kept, live.path):
            taken += self._owners.keep(owner, given)
        self._owners.touch(live.path)
        return taken

    def give(self, live: LiveRequest, segments: Iterable[KVSegment], path: Path) -> None:
        """Let the owners of a path have KV of a request, which reads it there from now on."""
        for owner, given in self._given(live, segments, path):
            if self._owners.give(owner, live.request.request_id, given):
                live.borrow(owner)

    def _given(
        self, live: LiveRequest, segments: Iterable[KVSegment], path: Path
    ) -> Iterator[tuple[KVOwner, list[KVSegment]]]:
        """Yield the KV of a request that each owner may have. It is given before the next is yielded."""
        for owner, within in parts_within(path, segments):
            given = within if live.windows is None else list(self._windowed(owner, live, within))
            if given:
                yield owner, given
                if behind := [p for s in given for p in before((s.positions,), live.windows_from)]:
                    owner.windowless = coalesce((*owner.windowless, *behind))

    def _windowed(
        self, owner: KVOwner, live: LiveRequest, segments: Iterable[KVSegment]
    ) -> Iterator[KVSegment]:
        """Yield what an owner may have, so that all its copies of a position have windows, or none has.

        KV with windows takes the place of what nobody reads without.
        """
        segments = tuple(segments)
        owner.forget_windowless()
        new = [p for s in segments for p in at_or_after((s.positions,), live.windows_from)]
        for unread in owner.unread.segments:
            for positions in common(common((unread.positions,), *owner.windowless), *new):
                self._owners.remove(owner, unread._replace(positions=positions))
        owner.forget_windowless()
        self._owners.see(owner)
        held = owner.all_positions()
        for segment in segments:
            fresh = at_or_after((segment.positions,), live.windows_from)
            kept = (
                *subtract(before((segment.positions,), live.windows_from), *held),
                *subtract(fresh, *owner.windowless),
            )
            yield from [segment._replace(positions=positions) for positions in kept if positions]

    def left(self, live: LiveRequest, moved: KVSegment) -> list[KVSegment]:
        """Return what others may read where it was after it has moved: KV that the request alone has."""
        if not self._may_keep(live):
            return []
        own = [s for s in self._staying(live) if s.instance_id == moved.instance_id]
        return [s._replace(positions=p) for s in own for p in common((s.positions,), moved.positions)]

    def _follow(self, live: LiveRequest, token_ids: NDArray[np.int32]) -> None:
        request, before = live.request, live.path
        known = before if before and before[-1].positions.stop <= len(token_ids) else ()
        live.path = self._owners.path(f"{SALT}{request.cache_salt}", token_ids, known=known)
        if live.path == before:
            return
        self._owners.follow(request.request_id, live.path)
        kept = {owner.owner_id for owner, _ in live.path}
        left = tuple([part for part in before if part.owner.owner_id not in kept])
        self._owners.unfollow(request.request_id, left)

    def _is_cacheable(self, request: Request) -> bool:
        """Return whether others may read its KV; a `range` stands for tokens that nobody else has."""
        return self._owners.keeps and request.uses_cache and not isinstance(request.prompt_token_ids, range)

    def _may_keep(self, live: LiveRequest) -> bool:
        return live.is_sound and self._is_cacheable(live.request)

    def _staying(self, live: LiveRequest) -> list[KVSegment]:
        """Return its own KV on instances that take new KV."""
        return [segment for segment in live.own.segments if self._pools.keeps(segment.instance_id)]
