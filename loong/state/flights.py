"""Batches and migrations in flight."""

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from loong.core.errors import InvalidEventError
from loong.core.instructions import ExtendLease, MoveKV, ReleaseWindows, RunBatch, RunScoredBatch, StopLease
from loong.core.placement import InstanceId, KVSegment, tokens_by_instance
from loong.core.plan import BatchPlan, KVMigration, LeaseEnd, LeaseExtension
from loong.core.positions import common
from loong.core.shared_kv import num_saved_keys, reading_together
from loong.core.snapshot import RunningBatch, Snapshot
from loong.state.counts import Counts
from loong.state.in_flight_batch import InFlightBatch
from loong.state.live_request import LiveRequest
from loong.state.live_requests import LiveRequests
from loong.state.pool_ledger import PoolLedger


class Flights:
    """Batches and migrations in flight, with the room that they reserve and the requests that they touch.

    Batches that are `ending` are in flight too, but their instances and requests are as if they had ended.
    """

    def __init__(
        self, pools: PoolLedger, requests: LiveRequests, counts: Counts, least_saved: int | None = None
    ) -> None:
        self.batches: dict[int, InFlightBatch] = {}
        self.ending: dict[int, InFlightBatch] = {}
        self.migrations: dict[int, KVMigration] = {}
        self.copies: dict[int, KVMigration] = {}  # and moves, of owners that are no requests
        self.windows_from: dict[int, int] = {}  # what these migrations bring of layers with a window
        self._pools, self._requests, self._counts = pools, requests, counts
        self._least_saved = least_saved

    def batch(self, batch_id: int, did: str) -> InFlightBatch:
        """Return a batch in flight that `did` something. Raises `InvalidEventError` if there is none."""
        batch = self.batches.get(batch_id) or self.ending.get(batch_id)
        if batch is None:
            raise InvalidEventError(f"batch {batch_id} {did}, but is not running")
        return batch

    def open_batch(self, batch_id: int, plan: BatchPlan, snapshot: Snapshot) -> RunBatch:
        """Add a batch, planned for `snapshot`, with room for the KV that it will make."""
        lives = self._requests.of(plan)
        inputs = tuple([live.input_for(plan) for live in lives])
        sampling = [live for i, live in zip(inputs, lives, strict=True) if i.sampling_params is not None]
        sampled = {r.request.request_id: r for live in sampling for r in (live, *live.siblings)}
        start = max([snapshot.now, *self.ending_on(plan).values()])
        holder_ids = plan.holder_ids([live.placement for live in lives])
        running = RunningBatch(
            batch_id, plan, start, 0, last_step=plan.num_steps, stepped_at=start, holder_ids=holder_ids
        )
        asking = [live for live in lives if live.request.num_prompt_logprobs is not None]
        scored = tuple([chunk for live in asking if (chunk := live.scored_chunk(plan)) is not None])
        batch = RunScoredBatch(batch_id, plan, inputs, scored) if scored else RunBatch(batch_id, plan, inputs)
        used, stored = snapshot.instance, plan.num_stored_tokens
        reserved = tuple([(i, used[i].kv_used + stored.get(i, 0)) for i in plan.group.instance_ids])
        self._open(InFlightBatch(batch, running, sampled, reserved), lives)
        shared = {given.request_id: given.placement.shared for given in inputs}
        num_saved = sum(
            [num_saved_keys([shared[i] for i in ids], self._least_saved) for ids in reading_together(plan)]
            if any(shared.values())
            else ()
        )
        self._counts.add(num_relayed_tokens=num_saved)
        return batch

    def _open(self, batch: InFlightBatch, lives: Iterable[LiveRequest]) -> None:
        batch_id, plan = batch.running.batch_id, batch.plan
        self.batches[batch_id] = batch
        self._pools.reserve(plan.num_reserved_tokens)
        self._pools.run(plan.group.instance_ids, batch_id)
        self._counts.add_batch(batch.running, lives)
        group = frozenset(plan.group.instance_ids)
        for live in (*lives, *batch.siblings):
            self._requests.views.mark_stale(live)
            live.batch_id, live.last_group = batch_id, group

    def extend_lease(self, extension: LeaseExtension, snapshot: Snapshot) -> ExtendLease:
        """Continue a lease with more steps, and reserve room for them."""
        batch, plan = self.batches[extension.batch_id], snapshot.extended(extension)
        self._pools.reserve(Counter(plan.num_stored_tokens) - Counter(batch.plan.num_stored_tokens))
        batch.extend(plan)
        return ExtendLease(extension.batch_id, plan.group, plan.num_steps)

    def end_lease(self, end: LeaseEnd) -> StopLease:
        """End a lease before a step."""
        batch = self.batches[end.batch_id]
        batch.end_before(end.step)
        return StopLease(end.batch_id, batch.plan.group, end.step)

    def cut_short(self, batch_id: int) -> tuple[StopLease, ...]:
        """End a lease at the next step, if it is to take more."""
        running = self.batches[batch_id].running
        if not running.can_end_early:
            return ()
        return (self.end_lease(LeaseEnd(batch_id, running.num_steps_taken + 1)),)

    def close_batch(self, batch_id: int) -> list[LiveRequest]:
        """Remove a batch that has ended, and return its requests; siblings begin in any case.

        The KV it made becomes theirs. For requests that have ended, its reserved slots count instead.
        """
        if (batch := self.ending.get(batch_id)) is not None:
            lives = self._close_ending(batch_id)
            self._share_new(lives, batch.plan)
            return lives
        batch = self._free_instances(batch_id)
        lives, all_stored = [], list[KVSegment]()
        for request_id in batch.plan.request_ids:
            live = self._requests.changing(request_id)
            stored = batch.plan.writes_of(request_id) if live.has_ended else batch.made(live)
            live.batch_id, live.placement = None, live.placement.adding(stored)
            all_stored += stored
            lives.append(live)
        self._pools.release(Counter(batch.plan.num_reserved_tokens) - tokens_by_instance(all_stored))
        for live in tuple(lives):
            if live.siblings and live.request.request_id in batch.sampled:
                lives += self._requests.start_siblings(live)
        self._share_new(self._requests.of(batch.plan), batch.plan)
        return lives

    def _share_new(self, lives: Iterable[LiveRequest], plan: BatchPlan) -> None:
        for live in lives:
            live.note_new(plan)
            self._requests.sharing.share_new(live)

    def void_batch(self, batch_id: int) -> InFlightBatch:
        """Remove a batch that never ends; the KV that it has surely made stays."""
        if (batch := self.ending.get(batch_id)) is not None:
            for live in self._close_ending(batch_id):
                for segment in batch.plan.writes_of(live.request.request_id):
                    live.placement = live.placement.removing(segment)
            self._pools.release(batch.plan.num_reserved_tokens)
            return batch
        batch = self._free_instances(batch_id)
        kept: Counter[InstanceId] = Counter()
        for request_id in batch.plan.request_ids:
            live = self._requests.changing(request_id)
            made = batch.made(live) if batch.is_lease else ()
            live.batch_id, live.placement = None, live.placement.adding(made)
            kept.update(tokens_by_instance(made))
        self._counts.add(num_computed_tokens=kept.total())
        self._pools.release(Counter(batch.plan.num_reserved_tokens) - kept)
        for sibling in batch.siblings:
            sibling.batch_id = None
        return batch

    def predict_end(self, batch_id: int, ends_at: float) -> bool:
        """Show the state after the end of a batch, unless it has ended already; return whether it does so.

        Its tokens have no ids yet, and nothing is released.
        """
        if (batch := self.batches.get(batch_id)) is not None and self._has_predictable_end(batch):
            self._predict_end(batch_id, ends_at)
        return batch_id in self.ending

    def _predict_end(self, batch_id: int, ends_at: float) -> None:
        self.ending[batch_id] = batch = self._free_instances(batch_id)
        batch.ends_at = ends_at
        for request_id in batch.plan.request_ids:
            live = self._requests.changing(request_id)
            live.batch_id, live.ending_id = None, batch_id
            live.placement = live.placement.adding(batch.plan.writes_of(request_id))
            if batch.num_tokens.get(request_id) == 0 and not live.has_ended:
                live.predicted_token_time = ends_at
            if live.num_output_tokens >= live.request.sampling_params.max_tokens:
                self._requests.leave(live)
            self._requests.leave_if_ending(live)

    def _has_predictable_end(self, batch: InFlightBatch) -> bool:
        """Return whether everything about a batch's end is known, except the tokens it samples.

        It is not for a lease, whose number of steps is open; for KV that moves, is to be read elsewhere, or
        has slots at its master until it is pushed; and for a batch that waits for another to end.
        """
        has_passing = batch.plan.num_reserved_tokens != batch.plan.num_stored_tokens
        if batch.is_lease or has_passing or self.ending_on(batch.plan):
            return False
        return not any(
            live.migration_ids or live.copied or live.siblings or live.is_to_switch
            for live in self._requests.of(batch.plan)
        )

    def ending_on(self, plan: BatchPlan) -> dict[int, float]:
        """Return the batches that are ending on instances of a plan, or make KV of its requests.

        Each has the time of its predicted end. KV that is made outside the group is served only after that.
        """
        if not self.ending:
            return {}
        group, request_ids = frozenset(plan.group.instance_ids), frozenset(plan.request_ids)
        return {
            batch_id: batch.ends_at
            for batch_id, batch in self.ending.items()
            if batch.ends_at is not None
            and not (
                group.isdisjoint(batch.plan.group.instance_ids)
                and request_ids.isdisjoint(batch.plan.request_ids)
            )
        }

    def leaving(self) -> Mapping[InstanceId, int]:
        """Return the KV of requests that no policy sees any more, since their batches are ending."""
        held: Counter[InstanceId] = Counter()
        read = set[KVSegment]()
        for batch in self.ending.values():
            for live in filter(attrgetter("is_leaving"), self._requests.of(batch.plan)):
                held.update(live.own.tokens_by_instance())
                for owner in live.borrowed:
                    read.update(owner.users[live.request.request_id])
        return held + tokens_by_instance(read)

    def open_migration(self, migration_id: int, migration: KVMigration) -> MoveKV:
        """Add a migration, with the room that it needs at its destination."""
        if migration.segment.owner_id in self._requests.owners.by_id:
            self.copies[migration_id] = migration
            return self._requests.copies.open(migration_id, migration)
        self.migrations[migration_id] = migration
        live = self._requests.changing(migration.segment.owner_id)
        live.migration_ids.add(migration_id)
        self._pools.reserve({migration.destination_id: len(migration.segment.positions)})
        self.windows_from[migration_id] = live.windows_from
        windowless = (range(live.windows_from),) if live.windows_from else ()
        return MoveKV(migration_id, migration, live.batch_id, windowless)

    def close_migration(self, migration_id: int) -> tuple[KVMigration, LiveRequest]:
        """Remove a migration. Returns it and its request; its reserved slots stay reserved.

        KV of layers with a window that the request needs no more goes at its destination, too.
        """
        migration = self.migrations.pop(migration_id, None)
        if migration is None:
            raise InvalidEventError(f"migration {migration_id} finished, but is not running")
        live = self._requests.changing(migration.segment.owner_id)
        live.migration_ids.discard(migration_id)
        owner_id, positions, instance_id = migration.arriving
        passed = range(self.windows_from.pop(migration_id), live.windows_from)
        for its in common((positions,), passed):
            self._requests.owners.instruct(ReleaseWindows(owner_id, (instance_id,), its))
        return migration, live

    def _free_instances(self, batch_id: int) -> InFlightBatch:
        batch = self.batches.pop(batch_id)
        self._pools.run(batch.plan.group.instance_ids, None)
        return batch

    def _close_ending(self, batch_id: int) -> list[LiveRequest]:
        lives = self._requests.of(self.ending.pop(batch_id).plan)
        for live in lives:
            live.ending_id, live.predicted_token_time = None, None
            live.is_leaving = live.has_ended and live.is_leaving
            self._requests.views.mark_stale(live)
        return lives
