"""Decodes on as few instances as meet their TPOT target, which read KV where it was computed.

The other instances serve that KV while they compute prompts, so nothing moves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, zip_longest
from math import inf

from loong.core.cost.work import WorkCount
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, Placement, striped
from loong.core.plan import BatchPlan, LeaseEnd
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import arrival_order, plan_lease
from loong.scheduler.common.masters import on_hosts_of_kv
from loong.scheduler.common.service import leased
from loong.scheduler.common.slo_targets import target_tpot
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.lease_timing import end_for
from loong.scheduler.esp.reasons import WaitReason, reason_to_wait
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


@dataclass(frozen=True)
class ServedDecodes:
    """The decodes of a draft."""

    draft: PlanDraft

    @property
    def snapshot(self) -> Snapshot:
        """Return the snapshot of the draft."""
        return self.draft.snapshot

    @cached_property
    def resting(self) -> tuple[RequestView, ...]:
        """Those that are not in flight and may take steps, oldest first."""
        return tuple(sorted(self.draft.decodes, key=arrival_order))

    @cached_property
    def leases(self) -> tuple[RunningBatch, ...]:
        """The batches of decodes in flight."""
        snapshot = self.snapshot
        return tuple(batch for batch in snapshot.batches if _is_decode(batch, snapshot))

    @cached_property
    def in_flight(self) -> tuple[RequestView, ...]:
        """Those in leases that have not ended."""
        views = (self.snapshot.request[r] for batch in self.leases for r in batch.plan.request_ids)
        return tuple(view for view in views if not view.has_ended)

    @cached_property
    def moving(self) -> tuple[RequestView, ...]:
        """Those whose KV is on its way to where they decode."""
        return tuple(view for view in self.snapshot.running if _is_moving(view))

    @property
    def all_views(self) -> tuple[RequestView, ...]:
        """All of them."""
        return self.resting + self.in_flight + self.moving

    @property
    def busy_ids(self) -> frozenset[InstanceId]:
        """The instances that run leases."""
        return frozenset(i for batch in self.leases for i in batch.plan.group.instance_ids)

    @cached_property
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """The last instances of hosts, as few as meet all TPOT targets and have room for all tokens to come.

        At least one and at most half of all. Where no number leaves a margin, the fewest that meet them
        without one. Targets that no number meets do not count; if none can be met, the quickest number.
        """
        most = len(self.snapshot.pools) - 1
        roomy = next((k for k in range(1, most) if self.num_spare(self._last(k), self.all_views) >= 0), most)
        able = [number for number in self._numbers if number >= roomy and self._is_clear(number)] or [roomy]
        targets = [target_tpot(view, self.draft.config) for view in self.all_views]
        number = self._fewest(able, min(targets, default=inf))
        if number is None:
            least = min(map(self._step_seconds, able))
            number = self._fewest(able, min((t for t in targets if t >= least), default=least))
        assert number is not None, "the quickest takes the least time"
        return self._last(number)

    @property
    def have_room(self) -> bool:
        """Return whether the chosen instances have slots for all tokens to come."""
        return self.num_spare(self.instance_ids, self.all_views) >= 0

    def lease(self) -> BatchPlan | None:
        """Return a lease of those that have room, on instances that are idle; None if there is none."""
        free = {i: self.snapshot.free[i] for i in self.instance_ids if self.snapshot.instance[i].is_idle}
        if not free or self.leases:
            return None
        views = leased(self.snapshot, self._with_room(sum(free.values())), free)
        if not views:
            return None
        preferred_ids = on_hosts_of_kv(self.snapshot)
        return plan_lease(free, views, self.draft.cost_model, self.draft.lease_steps, preferred_ids)

    def lease_ends(self) -> tuple[LeaseEnd, ...]:
        """Return ends of leases that others are to join, or that are to have other instances.

        A lease lasts for some time, so that decodes that come one by one do not each cost all a new one.
        """
        wanted = {i for i in self.instance_ids if i in self.busy_ids or self.snapshot.instance[i].is_idle}
        if not wanted or (wanted == self.busy_ids and not self._can_any_join()):
            return ()
        return tuple(end for batch in self.leases for end in end_for(self.draft, (), batch))

    def decisions(self, lease: BatchPlan) -> Iterator[Decision]:
        """Yield the reasons of a lease, and of waits for slots."""
        dop, num_instances, most = lease.group.dop, len(self.snapshot.pools), len(self.instance_ids)
        chosen = f"decodes on {dop} of {num_instances} instances, which read KV where it is"
        alternatives = (
            Alternative(chosen if k == dop else f"decodes on {k}", self._step_seconds(k))
            for k in self._numbers
            if k == dop or abs(k - most) <= 1
        )
        yield Decision(DecisionKind.DOP, lease.request_ids, chosen, tuple(alternatives))
        joined = frozenset(lease.request_ids)
        left_out = (v.request_id for v in self.resting if v.request_id not in joined)
        yield from reason_to_wait(left_out, WaitReason.NO_SLOTS)

    def _is_clear(self, number: int) -> bool:
        """Return whether these instances hold no KV of unfinished prompts, or are one, which may serve them.

        Attention for chunks of those would slow decodes.
        """
        return number == 1 or self._prompt_ids.isdisjoint(self._last(number))

    @cached_property
    def _prompt_ids(self) -> frozenset[InstanceId]:
        """The instances with KV of prompts that are being computed."""
        prompts = (v for v in self.snapshot.running if not (v.num_output_tokens or v.has_ended))
        return frozenset(i for view in prompts for i in view.placement.instance_ids)

    @cached_property
    def _numbers(self) -> range:
        return range(1, max(1, len(self.snapshot.pools) // 2) + 1)

    def _fewest(self, able: Sequence[int], target: float) -> int | None:
        """Return the least of these numbers that meets a TPOT target, with a margin if one does."""
        budgets = (PLANNED_TPOT_SHARE * target, target)
        return next((k for budget in budgets for k in able if self._step_seconds(k) <= budget), None)

    def _last(self, number: int) -> tuple[InstanceId, ...]:
        """Return the last instances of the hosts, taken from each host in turn."""
        hosts: dict[int, list[InstanceId]] = {}
        for instance_id in sorted(self.snapshot.pools, reverse=True):
            hosts.setdefault(self.snapshot.instance[instance_id].host_id, []).append(instance_id)
        in_turn = (i for taken in zip_longest(*hosts.values()) for i in taken if i is not None)
        return tuple(sorted(islice(in_turn, number)))

    def _can_any_join(self) -> bool:
        """Return whether a waiting decode has room for all its tokens, and those in flight for theirs."""
        num_spare = self.num_spare(self.instance_ids, self.in_flight)
        return any(view.num_remaining_tokens <= num_spare for view in self.resting)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step of all of them; 0 if there are none."""
        return self._step_seconds(len(self.instance_ids)) if self.all_views else 0.0

    def num_spare(self, instance_ids: Sequence[InstanceId], views: Iterable[RequestView]) -> int:
        """Return the slots there, free or in leases for steps to come, that these do not need to end."""
        num_free = sum(self.snapshot.free[i] for i in instance_ids)
        for batch in self.leases:
            masters = [block.master_id for block in batch.plan.queries]
            num_free += sum(batch.plan.num_stored_tokens.get(i, 0) for i in instance_ids)
            num_free -= batch.num_steps_taken * sum(map(masters.count, instance_ids))
        return num_free - sum(view.num_remaining_tokens for view in views)

    @cached_property
    def _step_seconds(self) -> Callable[[int], float]:
        """Return the seconds of a step of all decodes, by the number of masters."""

        @cache
        def seconds(number: int) -> float:
            group = ESPGroup(self._last(number))
            count = WorkCount(group.instance_ids, is_lease=True)
            for place, view in enumerate(self.all_views):
                master_id = group.instance_ids[place % number]
                count.add_decode(
                    master_id, moved_to(master_id, view) if view.is_migrating else view.placement
                )
            return self.draft.cost_model.step_time(count.step(group, is_first=False))

        return seconds

    def _with_room(self, num_free: int) -> list[RequestView]:
        """Return those that can all end in this number of slots, and at least one.

        Those that have slots there come first, then the oldest. So what holds slots there can end.
        """
        views, there = list[RequestView](), frozenset(self.instance_ids)
        for view in sorted(self.resting, key=lambda v: there.isdisjoint(v.placement.instance_ids)):
            num_free -= view.num_remaining_tokens
            if views and num_free < 0:
                break
            views.append(view)
        return views


def moved_to(instance_id: InstanceId, view: RequestView) -> Placement:
    """Return the placement of all KV of a request on one instance."""
    return striped(view.request_id, range(view.placement.num_tokens), (instance_id,))


def _is_moving(view: RequestView) -> bool:
    """Return whether a decode waits for its KV."""
    return view.is_migrating and view.batch_id is None and view.num_output_tokens > 0 and not view.has_ended


def _is_decode(batch: RunningBatch, snapshot: Snapshot) -> bool:
    """Return whether a batch has nothing but newest tokens."""
    views = map(snapshot.request.__getitem__, batch.plan.request_ids)
    return (
        bool(batch.plan.queries)
        and all(len(block.positions) == 1 for block in batch.plan.queries)
        and all(view.num_output_tokens for view in views)
    )
