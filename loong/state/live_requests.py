"""All live requests, and the KV that they have."""

from collections.abc import Iterable

from loong.core.errors import InvalidEventError
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.placement import KVSegment, Placement, tokens_by_instance
from loong.core.plan import BatchPlan
from loong.core.request import Request, RequestId
from loong.state.counts import Counts
from loong.state.live_request import LiveRequest
from loong.state.owners import KVOwners
from loong.state.pool_ledger import PoolLedger
from loong.state.request_view_cache import RequestViewCache


class LiveRequests:
    """Requests from their arrival until they have ended and nothing in flight touches them.

    A request that is to be changed is taken from `changing`, so that its view is made anew. No live request
    needs more than `most_tokens`.
    """

    def __init__(self, pools: PoolLedger, counts: Counts) -> None:
        self.by_id: dict[RequestId, LiveRequest] = {}
        self.views = RequestViewCache()
        self.owners = KVOwners()
        self.most_tokens = 0
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
            new.number = self._num_arrived
            self.by_id[new.request.request_id] = new
            self.views.mark_stale(new)
        self._counts.add(num_arrived=request.num_choices)

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
        own = primary.own
        primary.borrow(self.owners.make(own), tuple([segment.positions for segment in own.segments]))
        siblings = self.start_without_kv(primary)
        for sibling in siblings:
            sibling.batch_id, sibling.placement = None, primary.placement.of(sibling.request.request_id)
            for owner in primary.borrowed:
                sibling.borrow(owner, owner.users[primary.request.request_id])
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

        KV that was copied while a batch read it is at its destination from now on.
        """
        instructions: list[Instruction] = []
        for live in lives:
            if live.batch_id is None and live.ending_id is None:
                instructions += self._switch_copied(live)
            if live.has_ended and live.is_at_rest:
                request_id = live.request.request_id
                instructions += self.drop_kv(request_id)
                self._leave_choices(live)
                del self.by_id[request_id]
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
        """Release all KV of a request not in flight."""
        live = self.changing(request_id)
        placement, live.placement = live.placement, Placement()
        self.release_kv(live, placement.segments)
        self.owners.leave(request_id, live.borrowed)
        live.borrowed, live.lost_until = (), 0
        holders = placement.instance_ids
        return (ReleaseKV(request_id, holders),) if holders else ()

    def evict(self, segment: KVSegment) -> ReleaseKV:
        """Drop KV of a request not in flight, which misses just these positions then."""
        live = self.changing(segment.owner_id)
        live.evict(segment)
        return self.released(live, segment)

    def released(self, live: LiveRequest, segment: KVSegment) -> ReleaseKV:
        """Release KV that a request has no more; return the instruction for it."""
        self.release_kv(live, (segment,))
        return ReleaseKV(segment.owner_id, (segment.instance_id,), segment.positions)

    def release_kv(self, live: LiveRequest, segments: Iterable[KVSegment]) -> None:
        """Count the slots that a request releases as free, except those that others read too."""
        num_tokens = tokens_by_instance(segments)
        for owner in live.borrowed:
            for user_id in owner.users:
                self.changing(user_id)
            num_tokens.subtract(owner.give_back(live.request.request_id, segments))
        self._pools.release(num_tokens)

    def _switch_copied(self, live: LiveRequest) -> list[Instruction]:
        instructions: list[Instruction] = []
        for migration in live.copied:
            live.placement = live.placement.moving(migration.segment, migration.destination_id)
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
                primary.num_losses, primary.suspected = live.num_losses, live.suspected
            self.views.mark_stale(primary)
