"""Decodes on as few instances as meet their TPOT target, each with leases of its own.

KV that is elsewhere is read where it was computed, so nothing needs to move.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from math import inf

from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, LeaseEnd
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import arrival_order, plan_lease
from loong.scheduler.common.service import leased
from loong.scheduler.common.slo_targets import target_tpot, tightest_tpot
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.homes import Homes
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

    @cached_property
    def homes(self) -> Homes:
        """The instances on which they may decode."""
        return Homes(self.draft, self.leases, self.all_views)

    @cached_property
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
        roomy = next((k for k in range(1, most) if self._num_spare(k) >= 0), most)
        numbers = self._numbers if self.draft.variant.has_spread else ()
        able = [number for number in numbers if number >= roomy] or [roomy]
        targets = [target_tpot(view, self.draft.config) for view in self.all_views]
        number = self._fewest(able, min(targets, default=inf))
        if number is None:
            least = min(map(self._step_seconds, able))
            number = self._fewest(able, min((t for t in targets if t >= least), default=least))
        assert number is not None, "the quickest takes the least time"
        return self._last(number)

    @property
    def have_room(self) -> bool:
        """Return whether each home has slots for all tokens to come."""
        home, num_to_come = self.homes.on(self.instance_ids), Counter[InstanceId]()
        for view in self.all_views:
            num_to_come[home[view.request_id]] += view.num_remaining_tokens
        return all(self.homes.num_spare((i,)) >= num_to_come[i] for i in self.instance_ids)

    def new_leases(self, busy_id: InstanceId | None = None) -> Iterator[BatchPlan]:
        """Yield leases of those that have room, on instances that are idle, but for one that is busy now."""
        snapshot, planned = self.snapshot, Counter[InstanceId]()
        for instance_id in self.instance_ids:
            if instance_id == busy_id or not snapshot.instance[instance_id].is_idle:
                continue
            free = {instance_id: snapshot.free[instance_id]}
            if views := leased(snapshot, self._with_room(instance_id), free, planned):
                lease = plan_lease(free, views, self.draft.cost_model, self.draft.lease_steps)
                if lease is not None:
                    planned.update(lease.holder_ids(view.placement for view in views))
                    yield lease

    def lease_ends(self) -> Iterator[LeaseEnd]:
        """Yield ends of leases that others are to join, or that are to have another instance.

        A lease lasts for some time, so that decodes that come one by one do not each cost all a new one.
        """
        wanted = {i for i in self.instance_ids if i in self.busy_ids or self.snapshot.instance[i].is_idle}
        for batch in self.leases if wanted else ():
            (instance_id, *others) = batch.plan.group.instance_ids
            if others or instance_id not in wanted or self._can_any_join(batch, instance_id):
                yield from end_for(self.draft, (), batch)

    def decisions(self, leases: Sequence[BatchPlan]) -> Iterator[Decision]:
        """Yield the reasons of leases, and of waits for slots."""
        if not leases:
            return
        number, num_instances = len(self.instance_ids), len(self.snapshot.pools)
        chosen = f"decodes on {number} of {num_instances} instances, which read KV where it is"
        alternatives = tuple(
            Alternative(chosen if k == number else f"decodes on {k}", self._step_seconds(k))
            for k in self._numbers
            if abs(k - number) <= 1
        )
        for lease in leases:
            yield Decision(DecisionKind.DOP, lease.request_ids, chosen, alternatives)
        joined = {request_id for lease in leases for request_id in lease.request_ids}
        begun = {self.home[request_id] for request_id in joined}
        left_out = (v.request_id for v in self.resting if v.request_id not in joined)
        yield from reason_to_wait((r for r in left_out if self.home[r] in begun), WaitReason.NO_SLOTS)

    @cached_property
    def home(self) -> Mapping[RequestId, InstanceId]:
        """The instance on which each decodes: one that computes no prompts now, if those meet all targets."""
        is_idle = {i: self.snapshot.instance[i].is_idle for i in self.instance_ids}
        ready = tuple(i for i in self.instance_ids if is_idle[i] or i in self.busy_ids)
        is_quick = ready and self.homes.step_seconds(ready) <= tightest_tpot(
            self.all_views, self.draft.config
        )
        return self.homes.on(ready if is_quick else self.instance_ids)

    @cached_property
    def views_at(self) -> Mapping[InstanceId, Sequence[RequestView]]:
        """The decodes of each instance."""
        views: dict[InstanceId, list[RequestView]] = {i: [] for i in self.instance_ids}
        for view in self.all_views:
            views[self.home[view.request_id]].append(view)
        return views

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

    def _can_any_join(self, batch: RunningBatch, instance_id: InstanceId) -> bool:
        """Return whether a waiting decode has room for all its tokens, and those of a lease for theirs."""
        request_ids = frozenset(batch.plan.request_ids)
        there = (view for view in self.in_flight if view.request_id in request_ids)
        num_spare = self.homes.num_spare((instance_id,), there)
        waiting = (view for view in self.resting if self.home[view.request_id] == instance_id)
        return any(view.num_remaining_tokens <= num_spare for view in waiting)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step of the slowest; 0 if there are none."""
        return self._step_seconds(len(self.instance_ids))

    @cached_property
    def seconds_at(self) -> Mapping[InstanceId, float]:
        """The seconds of a step of each instance that has decodes."""
        return self.homes.seconds_at(self.home)

    def _step_seconds(self, number: int) -> float:
        return self.homes.step_seconds(self._last(number))

    def _num_spare(self, number: int) -> int:
        return self.homes.num_spare(self._last(number), self.all_views)

    def _with_room(self, instance_id: InstanceId) -> list[RequestView]:
        """Return those at home there that can all end in its free slots, and at least one.

        Those that have slots there come first, then the oldest. So what holds slots there can end.
        """
        num_free = self.snapshot.free[instance_id]
        views = list[RequestView]()
        own = (view for view in self.resting if self.home[view.request_id] == instance_id)
        for view in sorted(own, key=lambda v: instance_id not in v.placement.instance_ids):
            num_free -= view.num_remaining_tokens
            if views and num_free < 0:
                break
            views.append(view)
        return views


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
