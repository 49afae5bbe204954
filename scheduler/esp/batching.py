"""The next batch of a group: a lease of its decodes, or one step of prompts and decodes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.cluster_parts import hosts_of
from loong.scheduler.common.masters import choose_lease, holder_ids, on_hosts_of_kv
from loong.scheduler.common.slo_targets import target_tpot, tightest_tpot
from loong.scheduler.common.striping import RequestPart
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.interleaving import PrefillDecodeInterleaving
from loong.scheduler.esp.late_prompts import is_share_due
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.esp.step_builder import StepBuilder
from loong.scheduler.esp.step_time import worthwhile_seconds
from loong.scheduler.tuning import (
    INTERLEAVING_GAIN,
    LONG_LEASE_KV_SHARE,
    MIN_CHUNK_TOKENS,
    MIN_TPOT_SHARE,
    PLANNED_TPOT_SHARE,
)

NO_LIMIT = 10**9  # seconds, or tokens


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Makes batches of idle instances. Steps without decodes take up to `step_seconds`."""

    draft: PlanDraft
    step_seconds: float

    @property
    def lease_steps(self) -> int:
        """Return the most steps of a usual lease."""
        return min(self.draft.lease_steps, self.draft.config.lease_steps)

    def lease(
        self,
        instance_ids: tuple[InstanceId, ...],
        decodes: Sequence[RequestView],
        seconds: float | None = None,
        most_steps: int | None = None,
    ) -> BatchPlan | None:
        """Return a lease with the most decode steps that there is room for and that fit into `seconds`.

        It has at most `most_steps`, or as many as a lease has.
        """
        if not decodes:
            return None
        if most_steps is None:
            most_steps = self._most_steps(instance_ids, decodes)
        step = self._decode_steps(instance_ids, decodes, most_steps)
        if step is not None and seconds is not None:
            step.shorten(int(seconds / step.seconds))
        return step.plan() if step is not None and step.num_steps else None

    def _most_steps(self, instance_ids: tuple[InstanceId, ...], decodes: Sequence[RequestView]) -> int:
        """Return the most steps of a lease: more than usual where many slots are free.

        A lease on several instances is short, so that they can part soon.
        """
        if len(instance_ids) > 1:
            return self.lease_steps
        num_spared = int(LONG_LEASE_KV_SHARE * self.draft.view.free[instance_ids[0]])
        return max(self.lease_steps, min(self.draft.lease_steps, num_spared // len(decodes)))

    def _decode_steps(
        self, instance_ids: tuple[InstanceId, ...], decodes: Sequence[RequestView], most_steps: int
    ) -> StepBuilder | None:
        """Return at most this number of steps of these decodes, or an empty step; None if room lacks."""
        draft, free = self.draft, {i: self.draft.view.free[i] for i in instance_ids}
        several_hosts = draft.snapshot.num_hosts > 1
        preferred_ids = on_hosts_of_kv(draft.snapshot) if several_hosts else holder_ids
        found = choose_lease(decodes, free, most_steps, preferred_ids) if decodes else (1, [])
        if found is None:
            return None
        num_steps, masters = found
        max_tokens = draft.config.max_num_batched_tokens if draft.variant.has_chunks else NO_LIMIT
        is_fixed = draft.variant.is_fixed
        step = StepBuilder(instance_ids, free, draft.cost_model, max_tokens, num_steps, is_fixed)
        step.add_decodes(masters)
        return step

    def with_prompts(
        self,
        instance_ids: tuple[InstanceId, ...],
        decodes: Sequence[RequestView],
        prefills: Sequence[PrefillCandidate],
    ) -> BatchPlan | None:
        """Return a step of prompts and decodes, or only one kind if the mixed step is much slower.

        Decodes must not miss their targets by that.
        """
        only_decodes = self._decode_steps(instance_ids, decodes, 1)
        if only_decodes is None:
            return None
        if not decodes:
            step = self._filled(only_decodes, prefills, self.budget(()))
            return step.plan() if step.shares else None
        interleaving = PrefillDecodeInterleaving(
            only_decodes.seconds, tightest_tpot(decodes, self.draft.config)
        )
        budget = self.budget(decodes)
        if interleaving.is_hopeless:
            budget = max(budget, 2 * interleaving.decode_seconds)
        mixed = self._filled(only_decodes, prefills, budget)
        budget = min(self.budget(()), interleaving.saved * self.lease_steps)
        only_prompts = self._decode_steps(instance_ids, (), 1)
        assert only_prompts is not None, "without decodes it needs no room"
        self._filled(only_prompts, prefills, budget)
        if INTERLEAVING_GAIN * mixed.prompt_speed >= interleaving.prompt_share * only_prompts.prompt_speed:
            return mixed.plan()
        num_due = interleaving.num_due(
            decodes, self.draft.snapshot.now, only_prompts.seconds, self.lease_steps
        )
        return self.lease(instance_ids, decodes, most_steps=num_due) if num_due else only_prompts.plan()

    def _filled(self, step: StepBuilder, prefills: Sequence[PrefillCandidate], budget: float) -> StepBuilder:
        """Return the step with chunks of prompts in order, as far as they fit into `budget`.

        In a step without decodes, the budget is at least the step's fixed overhead, including what the oldest
        deferred prompt has added.
        """
        is_alone = not step.decodes and len(prefills) == 1
        if overdue := [p for p in prefills if p.is_late]:
            budget = self._paying(step, prefills[0], budget)
            oldest = min(overdue, key=lambda p: p.view.arrival_time)
            reading = step.reading_seconds(oldest.view)
            begun = step.begun_seconds + reading
            least = begun + max(self.draft.config.deferred_share * (budget - begun), reading)
            spared = budget - sum(p.work for p in prefills if p.rank < oldest.rank) / step.dop
            has_share = is_share_due(oldest, step.dop, self.draft)
            share_budget = max(least if has_share else 0.0, spared)
            min_tokens = MIN_CHUNK_TOKENS if has_share else 0  # otherwise it might never go on
            if self._add(step, oldest, share_budget, is_alone, min_tokens):
                prefills = [p for p in prefills if p is not oldest]
        num_added = self._fill(step, prefills, budget, is_alone)
        for prefill in prefills if not num_added else ():
            if self._add(step, prefill, budget, is_alone, MIN_CHUNK_TOKENS):
                break
        return step

    def _fill(
        self, step: StepBuilder, prefills: Sequence[PrefillCandidate], budget: float, is_alone: bool
    ) -> int:
        """Add chunks of prompts in order. Returns the number of their tokens."""
        num_added, too_long = 0, NO_LIMIT  # tokens, from which one without a history does not fit
        for prefill in prefills:
            if not num_added:
                budget = self._paying(step, prefill, budget)
            elif prefill.num_tokens >= too_long:
                continue
            num_tokens = self._add(step, prefill, budget, is_alone)
            num_added += num_tokens
            if step.is_full(budget):
                break
            too_long = NO_LIMIT if num_tokens or prefill.num_cached else prefill.num_tokens
        return num_added

    def _paying(self, step: StepBuilder, prefill: PrefillCandidate, budget: float) -> float:
        """Return the budget, raised in a step without decodes so that useful work outweighs overhead."""
        return budget if step.decodes else worthwhile_seconds(step, prefill, budget, self.draft.config)

    def budget(self, decodes: Iterable[RequestView]) -> float:
        """Return the seconds that a step may take."""
        if not self.draft.variant.has_chunks:
            return NO_LIMIT
        budget = self.step_seconds
        for view in decodes:
            tpot = target_tpot(view, self.draft.config)
            seconds = PLANNED_TPOT_SHARE * tpot
            if view.first_token_time is not None:
                slack = view.first_token_time + tpot * view.num_output_tokens - self.draft.snapshot.now
                seconds = max(MIN_TPOT_SHARE * tpot, min(seconds, slack))
            budget = min(budget, seconds)
        return budget

    def _add(
        self, step: StepBuilder, prefill: PrefillCandidate, budget: float, is_alone: bool, min_tokens: int = 0
    ) -> int:
        """Add the next chunk of a prompt: on one instance if all of it fits there, else over the group.

        A prompt that `is_alone` is computed whichever way is faster. Returns the number of its tokens.
        """
        view = prefill.view
        if not view.cached:
            return self._add_there(step, prefill, budget, is_alone, min_tokens)
        with step.borrowing(view) as has_room:
            return self._add_there(step, prefill, budget, is_alone, min_tokens) if has_room else 0

    def _add_there(
        self, step: StepBuilder, prefill: PrefillCandidate, budget: float, is_alone: bool, min_tokens: int
    ) -> int:
        view = prefill.view
        if step.dop == 1:
            return step.add(view, step.sizer.whole(view, step.instance_ids[0], budget, min_tokens))
        share = None
        if not (len(view.placement.instance_ids) > 1 or step.count.has_ring):
            share = self._on_one(step, prefill, budget)
        if share is None:
            return step.add(view, step.striped(view, budget, self._keeper_ids(step, view), min_tokens))
        keeper_ids = self._keeper_ids(step, view) if is_alone else ()
        if keeper_ids and (striped := step.striped(view, budget, keeper_ids)) is not None:
            share = min(
                share, striped, key=lambda part: (-part.num_tokens, step.sizer.seconds_with(view, part))
            )
        return step.add(view, share)

    def _keeper_ids(self, step: StepBuilder, view: RequestView) -> Collection[InstanceId]:
        """Return the instances that may keep a prompt's KV: those of one host, if one has room for all.

        So hosts that are planned together for another request can part when that has ended.
        """
        snapshot, held = self.draft.snapshot, view.placement.instance_ids
        rooms = {
            host: sum(step.free.get(i, 0) for i in host)
            for host in (hosts_of(snapshot) if snapshot.num_hosts > 1 else ())
            if set(held).issubset(host) and sum(snapshot.pools[i] for i in host) >= view.num_final_tokens
        }
        roomiest = max(rooms, key=rooms.__getitem__, default=())
        return roomiest if rooms.get(roomiest, 0) >= view.num_uncomputed_tokens else step.instance_ids

    @staticmethod
    def _on_one(step: StepBuilder, prefill: PrefillCandidate, budget: float) -> RequestPart | None:
        """Return the rest of a prompt on the least busy instance that holds it and has room, or None."""
        held = prefill.view.placement.instance_ids
        able = [i for i in held if i in step.instance_ids] or step.instance_ids
        seconds, free = step.instance_seconds, step.free
        best = min(able, key=lambda i: (free[i] < prefill.num_tokens, seconds[i], -free[i], i))
        return step.sizer.whole(prefill.view, best, budget, at_least=prefill.num_tokens)
