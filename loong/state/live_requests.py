"""All live requests, and the KV that they have."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from loong.core.errors import InvalidEventError
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement, tokens_by_instance
from loong.core.plan import BatchPlan, Borrowing
from loong.core.positions import common
from loong.core.request import Request, RequestId
from loong.state.copies import Copies
from loong.state.counts import Counts
from loong.state.live_request import LiveRequest
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.prefix_tree import SALT, Path, PrefixTree, parts_within
from loong.state.request_view_cache import RequestViewCache
from loong.state.shared_work import SharedWork


class LiveRequests:
    """Requests from their arrival until they have ended and nothing in flight touches them.

    A request that is to be changed is taken from `changing`, so that its view is made anew. No live request
    needs more than `most_tokens`. Steps read what they share once, unless `least_saved` is None.
    """

    def __init__(
        self, pools: PoolLedger, counts: Counts, *, keeps_prefixes: bool, least_saved: int | None = 1
    ) -> None:
        self.by_id: dict[RequestId, LiveRequest] = {}
        self.views = RequestViewCache()
        self.owners = PrefixTree(pools, keeps=keeps_prefixes, remembers=keeps_prefixes)
        self.copies = Copies(pools, self.owners, counts)
        self.shared_work = SharedWork()
        self.most_tokens = 0
        self._reads_once = least_saved is not None
        self._pools, self._counts = pools, counts
        self._num_arrived = 0

    def arrive(self, request: Request) -> None:
        """Add a new request: its first choice, with the others as siblings."""
        for request_id in request.choice_ids:
            if request_id in self.by_id:
                raise InvalidEventError(f"request {request_id} arrived twice")
        choices = LiveRequest.choices_of(request)
        self.most_tokens = max(self.most_tokens, choices[0].view().num_final_tokens)
        for new in choices:
            self._num_arrived += 1
            new.number, new.reads_once = self._num_arrived, self._reads_once
            self.by_id[new.request.request_id] = new
            self.views.mark_stale(new)
        self._enter_tree(choices[0])
        self._counts.add(num_arrived=request.num_choices)

    def refresh(self) -> None:
        """Make the views of all requests that have changed, or that may borrow something else now."""
        for owner in self.owners.changed:
            waiting = [r for r in owner.followers if not self.by_id[r].has_begun]
            for request_id in (*owner.users, *waiting):
                self.views.mark_stale(self.by_id[request_id])
        self.owners.refresh_views()
        for live in self.shared_work.update(self.views.stale):
            self.views.mark_stale(live)
        self.views.refresh()

    def changing(self, request_id: RequestId) -> LiveRequest:
        """Return a live request that is to be changed."""
        live = self.by_id[request_id]
        self.views.mark_stale(live)
        return live

    def of(self, plan: BatchPlan) -> list[LiveRequest]:
        """Return the requests of a batch."""
        return [self.by_id[request_id] for request_id in plan.request_ids]

    def start_siblings(self, primary: LiveRequest) -> list[LiveRequest]:
        """Start the siblings of a request, which read all KV that it has. Returns them."""
        self._give(primary, primary.own.segments, primary.path)
        if kept := primary.own.segments:  # that others have elsewhere, or are not to have
            salt = f"choices-{primary.number}"  # ids may be used again
            path = self.owners.path(salt, primary.prompt_tokens(), is_kept=False)
            self._give(primary, kept, path)
        siblings = self.start_without_kv(primary)
        for sibling in siblings:
            request_id = sibling.request.request_id
            sibling.batch_id, sibling.placement = None, primary.placement.of(request_id)
            for owner in primary.borrowed:
                read = owner.read_by(primary.request.request_id).of(owner.owner_id)
                self.owners.lend(owner, request_id, read.segments)
                sibling.borrow(owner)
        return siblings

    def start_without_kv(self, primary: LiveRequest) -> list[LiveRequest]:
        """Start the siblings of a request. Returns them."""
        siblings = primary.siblings
        for choice in (primary, *siblings):
            choice.unstarted = []
            self.views.mark_stale(choice)
        return siblings

    def settle(self, lives: Iterable[LiveRequest]) -> tuple[Instruction, ...]:
        """Release the requests that have ended, once nothing in flight touches them.

        KV that was copied while a batch read it is at its destination from now on. Others go from KV of
        owners that is retired to a copy of it.
        """
        instructions: list[Instruction] = []
        for live in lives:
            if live.batch_id is None and live.ending_id is None:
                instructions += self._switch_copied(live)
                if not live.migration_ids:
                    instructions += self.copies.leave_retired(live)
            if live.has_ended and live.is_at_rest:
                request_id = live.request.request_id
                instructions += self.drop_kv(request_id)
                self._leave_choices(live)
                del self.by_id[request_id]
                self._leave_tree(live)
                self.views.drop(live)
                self._counts.add(num_ended=1)
        return tuple(instructions)

    def end(self, live: LiveRequest) -> tuple[Instruction, ...]:
        """End a request before its last token, and release it if nothing in flight touches it."""
        live.has_ended, live.predicted_token_time = True, None
        if live.batch_id is not None:
            return ()
        self.leave_if_ending(live)
        return self.settle((live,))

    def leave_if_ending(self, live: LiveRequest) -> None:
        """Hide a request from policies if it is over, and in flight only in a batch that is ending.

        Its KV counts as `leaving` until that batch has ended.
        """
        is_resting = live.batch_id is None and not live.migration_ids
        if live.has_ended and live.ending_id is not None and is_resting:
            self.leave(live)

    def leave(self, live: LiveRequest) -> None:
        """Hide a request from policies, as its batch is predicted to end it."""
        live.is_leaving = True
        self.views.drop(live)

    def drop_kv(self, request_id: RequestId) -> tuple[Instruction, ...]:
        """Release all KV of a request not in flight; others may use it until its room is needed."""
        live = self.changing(request_id)
        self._keep(live)
        placement, live.placement = live.placement, Placement()
        num_tokens = Counter(placement.tokens_by_instance())
        for owner in live.borrowed:
            read = self.owners.leave(owner, request_id)
            num_tokens.subtract(read.tokens_by_instance())
            if not live.is_sound:
                self.copies.distrust(owner, read)
        self._pools.release(num_tokens)
        live.borrowed, live.lost = (), ()
        holders = placement.instance_ids
        return (ReleaseKV(request_id, holders),) if holders else ()

    def preempt(self, request_id: RequestId) -> tuple[Instruction, ...]:
        """Let a request not in flight begin anew, with all KV that is left of it then."""
        released = self.drop_kv(request_id)
        self._enter_tree(self.by_id[request_id])
        return released

    def borrow(self, borrowing: Borrowing) -> int:
        """Let a request that begins read KV of other owners; return the number of tokens."""
        live = self.changing(borrowing.request_id)
        of_owner: dict[OwnerId, list[KVSegment]] = {}
        for segment in borrowing.segments:
            of_owner.setdefault(segment.owner_id, []).append(segment)
        for owner_id, segments in of_owner.items():
            owner = self.owners.by_id[owner_id]
            self.owners.lend(owner, borrowing.request_id, segments)
            live.borrow(owner)
        read = [segment._replace(owner_id=borrowing.request_id) for segment in borrowing.segments]
        live.regain(read)
        live.placement = live.placement.adding(read)
        self.owners.touch(live.path)
        return live.placement.num_tokens

    def share_new(self, live: LiveRequest) -> None:
        """Let others have what a request has computed of a prompt that begins like theirs."""
        if not live.has_unshared or live.ending_id is not None or live.has_ended:
            return
        shared = tuple([part for part in live.path if len(part.owner.followers) > 1])
        if shared:
            self._give(live, self._staying(live), shared)
            live.has_unshared = False

    def users_of(self, owners: Iterable[KVOwner]) -> list[LiveRequest]:
        """Return the requests that read KV of some owners."""
        return [self.by_id[r] for r in dict.fromkeys(r for owner in owners for r in owner.users)]

    def evict(self, segment: KVSegment) -> tuple[Instruction, ...]:
        """Drop KV that no request reads, or that of one not in flight, which misses these positions then."""
        if (owner := self.owners.by_id.get(segment.owner_id)) is not None:
            self.owners.remove(owner, segment)
            self.owners.drop_if_empty(owner)
            return ()
        live = self.changing(segment.owner_id)
        live.evict(segment)
        return (self.released(live, segment),)

    def lose(self, live: LiveRequest, instance_id: InstanceId) -> None:
        """Drop the KV of a request on an instance that is lost, except what it has a copy of elsewhere."""
        self.views.mark_stale(live)
        self.copies.leave_lost(live, instance_id)
        live.lose(instance_id)

    def released(self, live: LiveRequest, segment: KVSegment) -> ReleaseKV:
        """Release KV that a request has no more; return the instruction for it."""
        self.release_kv(live, (segment,))
        return ReleaseKV(segment.owner_id, (segment.instance_id,), segment.positions)

    def release_kv(self, live: LiveRequest, segments: Iterable[KVSegment]) -> None:
        """Count the slots that a request releases as free, except those of other owners."""
        num_tokens = tokens_by_instance(segments)
        for owner in live.borrowed:
            num_tokens.subtract(self.owners.end_use(owner, live.request.request_id, segments))
        self._pools.release(num_tokens)

    def _enter_tree(self, live: LiveRequest) -> None:
        """Let a request that waits find KV of others, and them that of the request."""
        if self._is_cacheable(live.request):
            self._follow(live, live.known_tokens())
            for owner, _ in live.path:
                if len(owner.followers) == 2:  # more share all that they compute
                    for request_id in owner.followers:
                        self.share_new(self.by_id[request_id])

    def _leave_tree(self, live: LiveRequest) -> None:
        self.owners.unfollow(live.request.request_id, live.path)
        for other in self.shared_work.drop(live):
            self.views.mark_stale(other)

    def _follow(self, live: LiveRequest, token_ids: NDArray[np.int32]) -> None:
        request, before = live.request, live.path
        live.path = self.owners.path(f"{SALT}{request.cache_salt}", token_ids)
        self.owners.follow(request.request_id, live.path)
        kept = {owner.owner_id for owner, _ in live.path}
        left = tuple([part for part in before if part.owner.owner_id not in kept])
        self.owners.unfollow(request.request_id, left)

    def _is_cacheable(self, request: Request) -> bool:
        """Return whether others may read its KV; a `range` stands for tokens that nobody else has."""
        return self.owners.keeps and request.uses_cache and not isinstance(request.prompt_token_ids, range)

    def _may_keep(self, live: LiveRequest) -> bool:
        return live.is_sound and self._is_cacheable(live.request)

    def _keep(self, live: LiveRequest) -> None:
        """Let others have the KV of all known tokens but the last, on instances that take new KV."""
        if not self._may_keep(live) or not live.placement.segments:
            return
        known = live.known_tokens()[:-1]
        self._follow(live, known)
        kept = [
            segment._replace(positions=positions)
            for segment in self._staying(live)
            for positions in common((segment.positions,), range(len(known)))
        ]
        self._give(live, kept, live.path)
        self.owners.touch(live.path)

    def _staying(self, live: LiveRequest) -> list[KVSegment]:
        """Return its own KV on instances that take new KV."""
        return [segment for segment in live.own.segments if self._pools.keeps(segment.instance_id)]

    def _give(self, live: LiveRequest, segments: Iterable[KVSegment], path: Path) -> None:
        for owner, within in parts_within(path, segments):
            if self.owners.give(owner, live.request.request_id, within):
                live.borrow(owner)

    def _switch_copied(self, live: LiveRequest) -> list[Instruction]:
        instructions: list[Instruction] = []
        for migration in live.copied:
            left = self._left_cached(live, migration.segment)
            live.placement = live.placement.moving(migration.segment, migration.destination_id)
            self._give(live, left, live.path)
            instructions.append(self.released(live, migration.segment))
        if live.copied:
            live.copied.clear()
            self.views.mark_stale(live)
        return instructions

    def _left_cached(self, live: LiveRequest, moved: KVSegment) -> list[KVSegment]:
        """Return what others may read where it was after it has moved: KV that the request alone has."""
        if not self._may_keep(live):
            return []
        own = [s for s in self._staying(live) if s.instance_id == moved.instance_id]
        return [s._replace(positions=p) for s in own for p in common((s.positions,), moved.positions)]

    def _leave_choices(self, live: LiveRequest) -> None:
        """Remove a choice that ends before it starts.

        If it is the primary, the next one is from now on. That is suspected like it, whose prompt it has.
        """
        choices = live.unstarted
        if not choices:
            return
        was_primary = choices[0] is live
        choices.remove(live)
        for primary in choices[:1]:
            if was_primary:
                self._enter_tree(primary)
                primary.num_losses, primary.suspected = live.num_losses, live.suspected
            self.views.mark_stale(primary)
