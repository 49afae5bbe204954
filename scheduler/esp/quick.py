"""Prompts on the instances for decodes, between leases, while the other instances compute long ones.

Short ones go first: so a chat waits for a step of a decode, not for one of a long prompt. A late prompt, the
guest, takes what is left of a pause, chunk by chunk: decodes alone would leave much of an instance unused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from loong.core.plan import BatchPlan, LeaseEnd
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
    def guest(self) -> PrefillCandidate | None:
        """The late prompt whose KV is all on one of these instances, or the oldest that may begin there.

        It ends no later than the other instances end all others.
        """
        if not self.draft.variant.has_guests or not self.seconds:
            return None
        prefills = [*self.draft.prefills, *self.draft.paused_late]
        late = [p for p in prefills if p.is_late and p not in self.prefills]
        here = frozenset(self.decodes.instance_ids)
        begun = (p for p in late if p.is_begun and here.issuperset(p.view.placement.instance_ids))
        work, num_others = sum(prefill.work for prefill in prefills), len(self.draft.prompt_ids)

        def is_worth_it(prefill: PrefillCandidate) -> bool:
            seconds = prefill.work / self._interleaving.prompt_share
            return seconds * num_others <= work - prefill.work

        new = (p for p in late if not p.is_begun and p.view.num_final_tokens <= self._room and is_worth_it(p))
        return next(begun, None) or next(new, None)

    @cached_property
    def _room(self) -> int:
        """The slots of one of these instances that no decode needs."""
        num_spare = self.decodes.num_spare(self.decodes.instance_ids, self.decodes.all_views)
        return min(num_spare, max(self.draft.view.free[i] for i in self.decodes.instance_ids))

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
        tpot = tightest_tpot(self.decodes.all_views, self.draft.config)
        return PrefillDecodeInterleaving(self.decodes.step_seconds, tpot)

    @property
    def _overhead(self) -> float:
        """The seconds of a pause for no tokens: the step itself, and a lease that ends and begins again.

        A lease that ends has one step more under way, whose tokens are dropped.
        """
        num_decodes = len(self.decodes.all_views)
        start = lease_start_time(self.decodes.instance_ids, num_decodes, self.draft.cost_model)
        return self.draft.cost_model.prefill_terms(1).least + start + self.decodes.step_seconds

    @cached_property
    def num_steps_due(self) -> int:
        """The decode steps that are due before a pause for the prompts."""
        pause = self._overhead + sum(prefill.work for prefill in self.prefills)
        if self.guest is not None:
            pause = max(pause, self.seconds)
        views, now = self.decodes.all_views, self.draft.snapshot.now
        return self._interleaving.num_due(views, now, pause, self.draft.config.lease_steps)

    def step(self, builder: BatchBuilder) -> BatchPlan | None:
        """Return a step of the prompts; None if no instance for decodes is idle, or decode steps are due."""
        idle = [i for i in self.decodes.instance_ids if i in self.draft.idle_ids]
        held = () if self.guest is None else self.guest.view.placement.instance_ids
        prefills = self.all_prefills if set(idle).issuperset(held) else self.prefills
        if not (prefills and idle) or self.num_steps_due:
            return None
        chosen = max(idle, key=lambda i: (i in held, self.draft.view.free[i], i))
        return builder.with_prompts((chosen,), (), prefills)

    def lease_ends(self) -> Iterator[LeaseEnd]:
        """Yield ends of leases for these prompts."""
        for batch in self.decodes.leases if self.all_prefills else ():
            yield from end_for(self.draft, self.all_prefills, batch, self.num_steps_due)
