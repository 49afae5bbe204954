"""Decodes on as few instances as meet their TPOT target, each with leases of its own.

There is time for short prompts in pauses, too. KV that is elsewhere is read where it was computed, so nothing
needs to move.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, islice, zip_longest
from math import inf

from loong.core.cost.work import WorkCount
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, LeaseEnd
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import arrival_order, plan_lease
from loong.scheduler.common.service import leased
from loong.scheduler.common.slo_targets import target_tpot, tightest_tpot
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.homes import Homes
from loong.scheduler.esp.lease_timing import end_for
from loong.scheduler.esp.prompt_order import prefill_work
from loong.scheduler.esp.reasons import WaitReason, reason_to_wait
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


@dataclass(frozen=True)
class ServedDecodes:
    """The decodes of a draft, on instances of its choice, or on those that are `given`."""

    draft: PlanDraft
    given: tuple[InstanceId, ...] | None = None

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
        """The batches of decodes in flight, but for those that pause prompts."""
        snapshot, (last,) = self.snapshot, self._last(1)
        return tuple(
            batch
            for batch in snapshot.batches
            if _is_decode(batch, snapshot)
            and (batch.plan.group.dop == 1 or last in batch.plan.group.instance_ids)
        )

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
        if self.given is not None:
            return self.given
        most = len(self.snapshot.pools) - 1
        roomy = next((k for k in range(1, most) if self._num_spare(k) >= 0), most)
        numbers = self._numbers if self.draft.variant.has_spread else ()
        able = [number for number in numbers if number >= roomy] or [roomy]
        targets = [target_tpot(view, self.draft.config) for view in self.all_views]
        number = self._fewest(able, min(targets, default=inf))
        if number is None:
            least = min(map(self._even_seconds, able))
            target = min((t for t in targets if t >= least), default=least)
            number = self._fewest(able, target)
            number = number or min(able, key=lambda k: self._token_seconds(k, target))
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
            Alternative(chosen if k == number else f"decodes on {k}", self._even_seconds(k))
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
        """The instance on which each decodes: one that computes no prompts now, if those meet all targets.

        Those with KV on an instance stay there while it computes prompts in a pause of its own decodes.
        """
        is_idle = {i: self.snapshot.instance[i].is_idle for i in self.instance_ids}
        ready = tuple(i for i in self.instance_ids if is_idle[i] or i in self.busy_ids)
        is_quick = ready and self.homes.step_seconds(ready) <= tightest_tpot(
            self.all_views, self.draft.config
        )
        home = self.homes.on(self.instance_ids)
        if not is_quick or len(ready) == len(self.instance_ids):
            return home
        pausing, ready_home = self._pausing_ids.difference(ready), self.homes.on(ready)
        waiting = {
            view.request_id
            for view in self.all_views
            if home[view.request_id] in pausing.intersection(view.placement.instance_ids)
        }
        return {r: home[r] if r in waiting else instance_id for r, instance_id in ready_home.items()}

    @property
    def _pausing_ids(self) -> frozenset[InstanceId]:
        """The instances of batches that these alone run."""
        groups = (batch.plan.group.instance_ids for batch in self.snapshot.batches)
        return frozenset(i for group in groups if set(group).issubset(self.instance_ids) for i in group)

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
        return next((k for budget in budgets for k in able if self._token_seconds(k, budget) <= budget), None)

    def _token_seconds(self, number: int, budget: float) -> float:
        """Return the mean seconds of a token, with pauses, if decodes were spread evenly over instances.

        A request that ends is replaced. The next one's prompt delays them as long as a step of its own, if it
        fits into a pause of the quickest decodes. They have what a budget leaves for pauses.
        """
        most_left = budget - self._even_seconds(self._numbers[-1])
        pause = min(self.draft.config.step_time, most_left * self.draft.config.lease_steps)
        place = bisect_right(self._prompts, (pause, inf))
        return self._even_seconds(number) + self._replaced[place] / number

    @cached_property
    def _even_seconds(self) -> Callable[[int], float]:
        """Return the seconds of a step of all decodes, spread evenly over a number of instances."""
        return cache(self._evenly_spread_seconds)

    def _evenly_spread_seconds(self, number: int) -> float:
        if not self.all_views:
            return 0.0
        count = WorkCount((0,), is_lease=True)
        count.add_lone_decodes(self._longest_first[::number])
        return self.draft.cost_model.step_time(count.step(ESPGroup((0,)), is_first=False))

    @cached_property
    def _longest_first(self) -> list[Placement]:
        placements = (view.placement for view in self.all_views)
        return sorted(placements, key=lambda placement: placement.num_tokens, reverse=True)

    @cached_property
    def _prompts(self) -> list[tuple[float, float]]:
        """The seconds of each decode's prompt, ascending, and those of a step of it for each output token."""
        terms = self.draft.cost_model.prefill_terms(1)
        works = ((prefill_work(view.num_prompt_tokens, 0, terms), view.max_tokens) for view in self.all_views)
        return sorted((work, (work + terms.least) / max_tokens) for work, max_tokens in works)

    @cached_property
    def _replaced(self) -> list[float]:
        """The sums of the latter of the first of these, from none to all."""
        return list(accumulate((seconds for _, seconds in self._prompts), initial=0.0))

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
        return self.homes.step_seconds(self.instance_ids)

    @cached_property
    def seconds_at(self) -> Mapping[InstanceId, float]:
        """The seconds of a step of each instance that has decodes."""
        return self.homes.seconds_at(self.home)

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
