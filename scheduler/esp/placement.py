"""The placement of KV of computed prompts: each way has a price, and the cheapest is taken.

KV that stays where it was computed is *served*: its holders answer the queries of every decode step, which
delays the step and the chunks that they compute. KV that *moves* to the instance that decodes is read there:
the request waits for the move once, and the instance reads more in every step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from loong.core.cost.work import WorkCount
from loong.core.decision import Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.plan import KVMigration
from loong.core.request import RequestView
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.slo_targets import target_tpot
from loong.scheduler.esp.decodes import ServedDecodes, moved_to
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.tuning import PLANNED_TPOT_SHARE

MOVED = "its prompt is computed, and reading its KV where it decodes costs less than serving it"


@dataclass(frozen=True, slots=True)
class Price:
    """The seconds that a way costs: of the request's own tokens, and of chunks that it slows.

    `tpot` is the time of each token to come, with waits.
    """

    seconds: float
    tpot: float


@dataclass(frozen=True)
class Placements:
    """The choice of a place for KV of decodes that are not in flight, oldest first."""

    draft: PlanDraft
    decodes: ServedDecodes
    destination_id: InstanceId

    @cached_property
    def moved(self) -> list[RequestView]:
        """The requests whose KV is to move to the destination."""
        candidates = [view for view in self.decodes.resting if self._may_move(view)]
        if not candidates:
            return []
        moved, num_spare = [], self._num_spare
        count = self._count_of(view for view in self.decodes.all_views if view not in candidates)
        for place, view in enumerate(candidates):
            later = self._added(count, candidates[place + 1 :])
            num_tokens = self._num_elsewhere(view)
            is_moved = num_tokens <= num_spare and self._is_cheaper_moved(view, later)
            if is_moved:
                moved.append(view)
                num_spare -= num_tokens
            placement = moved_to(self.destination_id, view) if is_moved else view.placement
            count.add_decode(self.destination_id, placement)
        return moved

    @property
    def _num_spare(self) -> int:
        """The slots of the destination that neither decodes nor prompts need for their outputs."""
        live = (v for v in self.draft.snapshot.running if not (v.num_output_tokens or v.has_ended))
        admitted = (p.view for p in self.draft.prefills if not p.is_begun)
        num_to_come = sum(view.num_remaining_tokens for view in (*live, *admitted))
        return self.decodes.num_spare((self.destination_id,), self.decodes.all_views) - num_to_come

    def _may_move(self, view: RequestView) -> bool:
        """Return whether a request has KV elsewhere, all of its prompt's, which no sibling waits for."""
        return self._num_elsewhere(view) > 0 and not (view.num_siblings or view.has_holes)

    def _num_elsewhere(self, view: RequestView) -> int:
        held = view.placement.tokens_by_instance()
        return view.placement.num_tokens - held.get(self.destination_id, 0)

    def _is_cheaper_moved(self, view: RequestView, others: WorkCount) -> bool:
        """Return whether KV that moves costs less than KV that is served, and all decodes stay in time."""
        served, moved = self._price(view, others, moves=False), self._price(view, others, moves=True)
        config = self.draft.config
        others_tpot = min(target_tpot(v, config) for v in self.decodes.all_views)
        step_tpot = moved.tpot - self._move_seconds(view) / view.num_remaining_tokens
        is_in_time = (
            moved.tpot <= PLANNED_TPOT_SHARE * target_tpot(view, config)
            and step_tpot <= PLANNED_TPOT_SHARE * others_tpot
        )
        return moved.seconds < served.seconds and (is_in_time or moved.tpot <= served.tpot)

    def _price(self, view: RequestView, others: WorkCount, *, moves: bool) -> Price:
        """Return what a request costs among these other decodes until its declared end."""
        cost_model, num_steps = self.draft.cost_model, view.num_remaining_tokens
        count = others.copy()
        count.add_decode(
            self.destination_id, moved_to(self.destination_id, view) if moves else view.placement
        )
        work = count.step(ESPGroup((self.destination_id,)), is_first=False)
        if not self._num_slowed:
            work = replace(work, idle_holder_ids=frozenset(work.holders))
        seconds = num_steps * cost_model.step_time(work)
        if moves:
            seconds += self._move_seconds(view)
            lost = cost_model.copying_time(self._num_elsewhere(view))
        else:
            alone = self._count_of((view,)).holders.values()
            lost = num_steps * max(map(cost_model.served_time, alone))
        return Price(seconds + lost * self._num_slowed, seconds / num_steps)

    def _move_seconds(self, view: RequestView) -> float:
        source_id = next(i for i in view.placement.instance_ids if i != self.destination_id)
        return self.draft.cost_model.migration_time(self._num_elsewhere(view), source_id, self.destination_id)

    @cached_property
    def _num_slowed(self) -> int:
        """The instances whose chunks wait for the slowest of them: none if no prompt is there."""
        is_any = self.draft.prefills or len(self.decodes.leases) < len(self.draft.snapshot.batches)
        return len(self.draft.prompt_ids) if is_any else 0

    def _count_of(self, views: Iterable[RequestView]) -> WorkCount:
        count = WorkCount((self.destination_id,), is_lease=True)
        for view in views:
            placement = moved_to(self.destination_id, view) if view.is_migrating else view.placement
            count.add_decode(self.destination_id, placement)
        return count

    def _added(self, count: WorkCount, views: list[RequestView]) -> WorkCount:
        """Return the work with more decodes, whose KV stays where it is."""
        more = count.copy()
        for view in views:
            more.add_decode(self.destination_id, view.placement)
        return more


def place(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Move KV of computed prompts to the instance that decodes, where that costs less than serving it.

    Those requests are not planned until it is there.
    """
    if not draft.variant.has_moves or len(decodes.instance_ids) > 1 or not decodes.resting:
        return draft
    if not draft.is_roomy:
        return draft  # KV stays spread, so that any free slot serves any request
    (destination_id,) = decodes.instance_ids
    moved = Placements(draft, decodes, destination_id).moved
    if not moved:
        return draft
    migrations = [
        KVMigration(segment, destination_id)
        for view in moved
        for segment in view.placement.segments
        if segment.instance_id != destination_id
    ]
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
