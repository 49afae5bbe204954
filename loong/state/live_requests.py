"""All live requests, and the KV that they have."""

from collections import Counter
from collections.abc import Iterable

from loong.core.errors import InvalidEventError
from loong.core.instructions import Instruction, ReleaseKV, ReleaseWindows
from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement, tokens_by_instance
from loong.core.plan import BatchPlan, Borrowing, KVMigration, PreemptionReason
from loong.core.positions import at_or_after
from loong.core.request import Request, RequestId
from loong.core.window_memory import WindowMemory
from loong.state.copies import Copies
from loong.state.counts import Counts
from loong.state.live_request import LiveRequest
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.prefix_sharing import PrefixSharing
from loong.state.prefix_tree import PrefixTree
from loong.state.request_view_cache import RequestViewCache
from loong.state.shared_work import SharedWork


class LiveRequests:
    """Requests from their arrival until they have ended and nothing in flight touches them.

    A request that is to be changed is taken from `changing`, so that its view is made anew. No live request
    needs more than `most_tokens`. Steps read what they share once, unless `least_saved` is None.
    """

    def __init__(
        self,
        pools: PoolLedger,
        counts: Counts,
        *,
        keeps_prefixes: bool,
        least_saved: int | None = 1,
        windows: WindowMemory | None = None,
    ) -> None:
        self.by_id: dict[RequestId, LiveRequest] = {}
        self.views = RequestViewCache()
        self.owners = PrefixTree(pools, keeps=keeps_prefixes, remembers=keeps_prefixes)
        self.sharing = PrefixSharing(self.by_id, self.owners, pools)
        self.copies = Copies(pools, self.owners, counts)
        self.shared_work = SharedWork()
        self.most_tokens = 0
        self._reads_once, self._windows = least_saved is not None, windows
        self._pools, self._counts = pools, counts
        self._num_arrived = 0

    def arrive(self, request: Request) -> None:
        """Add a new request: its first choice, with the others as siblings."""
        for request_id in request.choice_ids:
            if request_id in self.by_id:
                raise InvalidEventError(f"request {request_id} arrived twice")
        choices = LiveRequest.choices_of(request)
        num_new = request.num_choices * (request.sampling_params.max_tokens - 1)  # tokens with KV
        self.most_tokens = max(self.most_tokens, len(request.prompt_token_ids) + num_new)
        for new in choices:
            self._num_arrived += 1
            new.number, new.reads_once = self._num_arrived, self._reads_once
            new.windows = self._windows
            self.by_id[new.request.request_id] = new
            self.views.mark_stale(new)
        self.sharing.enter(choices[0])
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
        self.sharing.give(primary, primary.own.segments, primary.path)
        if kept := primary.own.segments:  # that others have elsewhere, or are not to have
            salt = f"choices-{primary.number}"  # ids may be used again
            path = self.owners.path(salt, primary.prompt_tokens(), is_kept=False)
            self.sharing.give(primary, kept, path)
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
            instructions += self.begin_broken_anew(live)
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
        kept = self.sharing.keep(live)
        placement, live.placement = live.placement, Placement()
        num_tokens = Counter(placement.tokens_by_instance())
        num_tokens.subtract(tokens_by_instance(kept))
        for owner in live.borrowed:
            read = self.owners.leave(owner, request_id)
            num_tokens.subtract(read.tokens_by_instance())
            if not live.is_sound:
                self.copies.distrust(owner, read)
        self._pools.release(num_tokens)
        live.borrowed, live.lost = (), ()
        live.windows_from, live.is_broken = 0, False
        holders = placement.instance_ids
        return (ReleaseKV(request_id, holders),) if holders else ()

    def preempt(self, request_id: RequestId) -> tuple[Instruction, ...]:
        """Let a request not in flight begin anew, with all KV that is left of it then."""
        released = self.drop_kv(request_id)
        self.sharing.enter(self.by_id[request_id])
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
        read = [KVSegment(borrowing.request_id, p, i) for _, p, i in borrowing.segments]
        live.regain(read)
        live.placement = live.placement.adding(read)
        self.owners.touch(live.path)
        return live.placement.num_tokens

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

    def release_arriving(self, live: LiveRequest, migration: KVMigration) -> None:
        """Release what a migration of a request does not bring, before the request reads a copy there."""
        self.owners.instruct(self.released(live, migration.arriving))

    def release_kv(self, live: LiveRequest, segments: Iterable[KVSegment]) -> None:
        """Count the slots that a request releases as free, except those of other owners."""
        num_tokens = tokens_by_instance(segments)
        for owner in live.borrowed:
            num_tokens.subtract(self.owners.end_use(owner, live.request.request_id, segments))
        self._pools.release(num_tokens)

    def begin_broken_anew(self, live: LiveRequest) -> tuple[Instruction, ...]:
        """Let a request begin anew if it has lost KV that cannot be computed, as windows before it are gone.

        It does once nothing in flight touches it. What is left of its windows may be of any tokens then.
        """
        if not live.lost or self._windows is None or live.has_ended:
            return ()
        first = max(0, live.placement.first_missing - self._windows.window + 1)
        is_moving = bool(live.migration_ids or live.copied)  # perhaps without the windows that it needs now
        live.is_broken |= live.lacks_windows(first) or (is_moving and live.windows_from > first)
        self.views.mark_stale(live)
        if not live.is_broken:
            live.windows_from = min(live.windows_from, first)
        elif live.is_at_rest and not live.copied:
            self._counts.add_preemptions((PreemptionReason.REPAIR,))
            for owner_id, positions, instance_id in live.own.segments:
                for its in filter(None, at_or_after((positions,), live.windows_from)):
                    self.owners.instruct(ReleaseWindows(owner_id, (instance_id,), its))
            live.windows_from = live.placement.stop
            return self.preempt(live.request.request_id)
        return ()

    def _leave_tree(self, live: LiveRequest) -> None:
        self.owners.unfollow(live.request.request_id, live.path)
        for other in self.shared_work.drop(live):
            self.views.mark_stale(other)

    def _switch_copied(self, live: LiveRequest) -> list[Instruction]:
        instructions: list[Instruction] = []
        for migration in live.copied:
            left = self.sharing.left(live, migration.segment)
            live.placement = live.placement.moving(migration.segment, migration.destination_id)
            self.sharing.give(live, left, live.path)
            instructions.append(self.released(live, migration.segment))
        if live.copied:
            live.copied.clear()
            self.views.mark_stale(live)
        return instructions

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
                self.sharing.enter(primary)
                primary.losses.take_over(live.losses)
            self.views.mark_stale(primary)
