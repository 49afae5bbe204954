"""The placement of KV of computed prompts: each way has a price, and the cheapest is taken.

KV that stays where it was computed is *served*: its holders answer the queries of every decode step, which
delays the step and the chunks that they compute. KV that *moves* to the instance that decodes is read there:
the request waits for the move once, and the instance reads more in every step.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from loong.core.cost.work import WorkCount
from loong.core.decision import Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.plan import KVMigration
from loong.core.request import RequestId, RequestView
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.slo_targets import target_tpot, tightest_tpot
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.homes import moved_to
from loong.scheduler.tuning import PLANNED_TPOT_SHARE

MOVED = "its prompt is computed, and reading its KV where it decodes costs less than serving it"


class Coming(NamedTuple):
    """A request that decodes soon, with its KV as it will be then.

    Its moves slow the chunk that computes it, by these seconds. It does not wait for them.
    """

    view: RequestView
    slowed: float


@dataclass(frozen=True)
class Placements:
    """The choice of a place for KV of requests that are `coming`, or of decodes that are not in flight."""

    draft: PlanDraft
    decodes: ServedDecodes
    destination_id: InstanceId
    coming: Sequence[Coming] = ()

    @cached_property
    def moved(self) -> list[RequestView]:
        """The requests whose KV is to move to the destination, in their order."""
        views = [coming.view for coming in self.coming] or self.decodes.resting
        candidates = [view for view in views if self._may_move(view)]
        if not candidates:
            return []
        moved, num_spare, served = list[RequestView](), self._num_spare, self._count_of(self._views)
        seconds = self._step_seconds(served)
        for view in candidates:
            num_tokens = self._num_elsewhere(view)
            if num_tokens > num_spare:
                continue
            without = served.copy()
            without.move_decode(self.destination_id, view.placement)
            moved_seconds = self._step_seconds(without)
            if self._is_cheaper_moved(view, seconds, moved_seconds):
                moved.append(view)
                num_spare -= num_tokens
                served, seconds = without, moved_seconds
        return moved

    @property
    def _num_spare(self) -> int:
        """The slots of the destination that neither decodes nor prompts need for their outputs."""
        live = (v for v in self.draft.snapshot.running if not (v.num_output_tokens or v.has_ended))
        admitted = (p.view for p in self.draft.prefills if not p.is_begun)
        num_to_come = sum(view.num_remaining_tokens for view in (*live, *admitted))
        num_spare = self.decodes.homes.num_spare((self.destination_id,), self._views)
        return num_spare - num_to_come // len(self.decodes.instance_ids)

    def _may_move(self, view: RequestView) -> bool:
        """Return whether a request of this home has KV elsewhere, of all tokens, and no siblings."""
        is_coming = view.request_id in self._slowed
        is_home = is_coming or self.decodes.home[view.request_id] == self.destination_id
        if not self.draft.snapshot.pools.keys() >= set(view.placement.instance_ids):
            return False  # what went to memory instances stays there
        return is_home and self._num_elsewhere(view) > 0 and not (view.num_siblings or view.has_holes)

    @cached_property
    def _views(self) -> Sequence[RequestView]:
        return (*self.decodes.views_at[self.destination_id], *[coming.view for coming in self.coming])

    @cached_property
    def _slowed(self) -> Mapping[RequestId, float]:
        """The seconds by which the move of each request that is coming slows a chunk."""
        return {coming.view.request_id: coming.slowed for coming in self.coming}

    def _num_elsewhere(self, view: RequestView) -> int:
        held = view.placement.tokens_by_instance()
        return view.placement.num_tokens - held.get(self.destination_id, 0)

    def _is_cheaper_moved(self, view: RequestView, served_step: float, moved_step: float) -> bool:
        """Return whether KV that moves costs less than KV that is served, and all decodes stay in time.

        Given are the seconds of a step of all decodes, with the request's KV served and moved. Every decode
        takes the steps that the request has to come.
        """
        num_steps, moving = view.num_remaining_tokens, self._move_seconds(view)
        moved_tpot = moved_step + moving / num_steps
        is_in_time = (
            moved_tpot <= PLANNED_TPOT_SHARE * target_tpot(view, self.draft.config)
            and moved_step <= PLANNED_TPOT_SHARE * self._tightest_tpot
        )
        if not (is_in_time or moved_tpot <= served_step):
            return False
        num_tokens = self._num_tokens_within(num_steps)
        return num_tokens * (moved_step - served_step) < self._serving_cost(view) - self._moving_cost(view)

    def _moving_cost(self, view: RequestView) -> float:
        """Return the seconds that a request waits for a move, and chunks for the copying."""
        if view.request_id in self._slowed:
            return (1 + self._num_slowed) * self._slowed[view.request_id]
        copying = self.draft.cost_model.copying_time(self._num_elsewhere(view))
        return self._move_seconds(view) + self._num_slowed * copying

    def _serving_cost(self, view: RequestView) -> float:
        """Return the seconds that chunks wait for the reads of all steps to come."""
        if not self._num_slowed:
            return 0.0
        alone = self._count_of((view,)).holders.values()
        return (
            self._num_slowed * view.num_remaining_tokens * max(map(self.draft.cost_model.served_time, alone))
        )

    def _num_tokens_within(self, num_steps: int) -> int:
        """Return the tokens of all decodes in this number of steps."""
        place = bisect_left(self._remaining, num_steps)
        return self._num_first[place] + num_steps * (len(self._remaining) - place)

    @cached_property
    def _remaining(self) -> list[int]:
        """The tokens to come of each decode, ascending."""
        return sorted(view.num_remaining_tokens for view in self._views)

    @cached_property
    def _num_first(self) -> list[int]:
        """The sums of the first of these, from none to all."""
        return list(accumulate(self._remaining, initial=0))

    @cached_property
    def _tightest_tpot(self) -> float:
        """The least TPOT target of all decodes."""
        return tightest_tpot(self._views, self.draft.config)

    def _step_seconds(self, count: WorkCount) -> float:
        """Return the seconds of a step of decodes."""
        work = count.step(ESPGroup((self.destination_id,)), is_first=False)
        if not self._num_slowed:
            work = replace(work, idle_holder_ids=frozenset(work.holders))
        return self.draft.cost_model.step_time(work)

    def _move_seconds(self, view: RequestView) -> float:
        if view.request_id in self._slowed:
            return 0.0
        source_id = next(i for i in view.placement.instance_ids if i != self.destination_id)
        return self.draft.cost_model.migration_time(self._num_elsewhere(view), source_id, self.destination_id)

    @cached_property
    def _num_slowed(self) -> int:
        """The instances whose chunks wait for the slowest of them: none if no prompt will be there."""
        is_any = len(self.decodes.leases) < len(self.draft.snapshot.batches)
        is_any |= any(prefill.view.request_id not in self._slowed for prefill in self.draft.prefills)
        return len(self.draft.prompt_ids) if is_any else 0

    def _count_of(self, views: Iterable[RequestView]) -> WorkCount:
        count = WorkCount((self.destination_id,), is_lease=True)
        for view in views:
            placement = moved_to(self.destination_id, view) if view.is_migrating else view.placement
            count.add_decode(self.destination_id, placement)
        return count


def place(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Move KV of computed prompts to the instances that decode, where that costs less than serving it.

    Those requests are not planned until it is there.
    """
    if not (draft.variant.has_moves and decodes.resting and draft.is_roomy):
        return draft  # where KV is short it stays spread, so that any free slot serves any request
    migrations, moved = list[KVMigration](), list[RequestView]()
    for destination_id in decodes.instance_ids:
        found = Placements(draft, decodes, destination_id).moved
        segments = (segment for view in found for segment in view.placement.segments)
        migrations += [KVMigration(s, destination_id) for s in segments if s.instance_id != destination_id]
        moved += found
    if not moved:
        return draft
    moved_ids = {view.request_id for view in moved}
    arriving = tokens_by_instance(migration.arriving for migration in migrations)
    snapshot = replace(
        draft.snapshot,
        instances=tuple(i.using(i.kv_used + arriving[i.instance_id]) for i in draft.snapshot.instances),
        running=tuple(
            replace(view, is_migrating=True, borrowed=()) if view.request_id in moved_ids else view
            for view in draft.snapshot.running
        ),
    )
    reason = Decision(DecisionKind.MIGRATE, tuple(view.request_id for view in moved), MOVED)
    return replace(
        draft,
        view=make_planning_view(snapshot),
        decodes=tuple(view for view in draft.decodes if view.request_id not in moved_ids),
        migrations=tuple(migrations),
        decisions=(*draft.decisions, reason),
    )
