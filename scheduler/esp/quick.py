"""Prompts on the instances for decodes, between leases, while the other instances compute long ones.

Short ones go first: so a chat waits for a step of a decode, not for one of a long prompt. A late prompt, the
guest, takes what is left of a pause, chunk by chunk: decodes alone would leave much of an instance unused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, LeaseEnd
from loong.core.request import RequestView
from loong.scheduler.common.leases import lease_start_time
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.interleaving import PrefillDecodeInterleaving
from loong.scheduler.esp.lease_timing import end_for
from loong.scheduler.esp.prompt_order import PrefillCandidate


@dataclass(frozen=True)
class QuickPrompts:
    """Prompts for pauses of the decodes, which make up for a pause by steps faster than their targets."""

    draft: PlanDraft
    decodes: ServedDecodes

    @cached_property
    def prefills(self) -> tuple[PrefillCandidate, ...]:
        """The most urgent prompts that fit whole into one pause, and into the slots that the decodes leave.

        None if there are no others, and the instances for prompts are idle.
        """
        seconds = self.seconds - self._overhead
        num_tokens, room = self.draft.config.max_num_batched_tokens, self._room
        chosen = []
        for prefill in self.draft.prefills:
            is_new = not (prefill.is_begun or prefill.is_deferred)
            is_short = prefill.work <= seconds and prefill.num_tokens <= num_tokens
            if is_new and is_short and prefill.view.num_final_tokens <= room:
                chosen.append(prefill)
                seconds -= prefill.work
                num_tokens -= prefill.num_tokens
                room -= prefill.view.num_final_tokens
        if len(chosen) == len(self.draft.prefills) and self.draft.idle_ids.issuperset(self.draft.prompt_ids):
            return ()
        return tuple(chosen)

    @cached_property
    def instance_id(self) -> InstanceId:
        """The instance whose decodes pause: that of a guest, else an idle one, with the quickest decodes."""
        if self._begun is not None:
            return self._begun.view.placement.instance_ids[0]
        free, idle_ids, leased_ids = self.draft.view.free, self.draft.idle_ids, self.decodes.busy_ids
        seconds = self.decodes.seconds_at
        return max(
            self.decodes.instance_ids,
            key=lambda i: (i in idle_ids, i in leased_ids, -seconds.get(i, 0.0), free[i], i),
        )

    @cached_property
    def guest(self) -> PrefillCandidate | None:
        """The late prompt whose KV is on an instance for decodes, or the first that may begin there.

        It ends no later than the other instances end all others.
        """
        if not self.seconds:
            return None
        if self._begun is not None:
            return self._begun if self._ends_first(self._begun) else None
        able = (p for p in self._late if not p.is_begun and p.view.num_final_tokens <= self._room)
        return next((p for p in able if p not in self.prefills and self._ends_first(p)), None)

    @cached_property
    def _begun(self) -> PrefillCandidate | None:
        """The guest that has begun."""
        here = [(i,) for i in self.decodes.instance_ids]
        return next((p for p in self._late if p.view.placement.instance_ids in here), None)

    @property
    def _late(self) -> Iterator[PrefillCandidate]:
        """The late prompts, most urgent first; none if no guest is wanted."""
        wanted = (*self.draft.prefills, *self.draft.paused_late) if self.draft.variant.has_guests else ()
        return (prefill for prefill in wanted if prefill.is_late)

    def _ends_first(self, prefill: PrefillCandidate) -> bool:
        """Return whether a prompt ends in these pauses before the instances for prompts end all others."""
        work = sum(p.work for p in (*self.draft.prefills, *self.draft.paused_late)) - prefill.work
        return prefill.work * len(self.draft.prompt_ids) <= work * self._interleaving.prompt_share

    @cached_property
    def _room(self) -> int:
        """The slots of the instance that no decode needs."""
        return self.decodes.homes.num_spare((self.instance_id,), self._views)

    @property
    def _views(self) -> Sequence[RequestView]:
        """The decodes that pause."""
        return self.decodes.views_at[self.instance_id]

    @cached_property
    def seconds(self) -> float:
        """The time of a pause: none if the decodes miss their targets anyway."""
        if self._interleaving.is_hopeless:
            return 0.0
        config = self.draft.config
        return min(config.step_time, self._interleaving.saved * config.lease_steps)

    @property
    def all_prefills(self) -> tuple[PrefillCandidate, ...]:
        """Return the short prompts, and the guest."""
        return self.prefills if self.guest is None else (*self.prefills, self.guest)

    @cached_property
    def _interleaving(self) -> PrefillDecodeInterleaving:
        """The decodes' pace."""
        tpot = tightest_tpot(self._views, self.draft.config)
        return PrefillDecodeInterleaving(self.decodes.seconds_at.get(self.instance_id, 0.0), tpot)

    @property
    def _overhead(self) -> float:
        """The seconds of a pause for no tokens: the step itself, and a lease that ends and begins again.

        A lease that ends has one step more under way, whose tokens are dropped.
        """
        start = lease_start_time((self.instance_id,), len(self._views), self.draft.cost_model)
        least = self.draft.cost_model.prefill_terms(1).least
        return least + start + self._interleaving.decode_seconds

    @cached_property
    def num_steps_due(self) -> int:
        """The decode steps that are due before a pause for the prompts."""
        pause = self._overhead + sum(prefill.work for prefill in self.prefills)
        if self.guest is not None:
            pause = max(pause, self.seconds)
        now, most_steps = self.draft.snapshot.now, self.draft.config.lease_steps
        return self._interleaving.num_due(self._views, now, pause, most_steps)

    def step(self, builder: BatchBuilder) -> BatchPlan | None:
        """Return a step of the prompts; None if the instance is not idle, or decode steps are due."""
        if not self.all_prefills or self.instance_id not in self.draft.idle_ids or self.num_steps_due:
            return None
        return builder.with_prompts((self.instance_id,), (), self.all_prefills)

    def lease_ends(self) -> Iterator[LeaseEnd]:
        """Yield the end of the instance's lease for these prompts."""
        for batch in self.decodes.leases if self.all_prefills else ():
            if self.instance_id in batch.plan.group.instance_ids:
                yield from end_for(self.draft, self.all_prefills, batch, self.num_steps_due)
