"""Elastic sequence parallelism, plainly: first come, first served, at the smallest DoP that is quick enough.

Cells (see `cell.py`) are merged, oldest request first, for two reasons: a request lacks room, or its first
token would be late at the DoP it has. A merge may take in a running lease, which then ends after its present
step while the rest of the cell waits for it. What is not merged runs on as it is. New KV stays on the fewest
instances that have room for it, so groups become small again by themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from loong.core.cost_model import CostModel, prefill_time
from loong.core.instance import ESPGroup
from loong.core.plan import BatchPlan, IterationPlan, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.batching import keep_on_fewest, lease_ends, plan_batch
from loong.scheduler.cell import Cell, arrival_order, cells_of, full_instances, merged_into
from loong.scheduler.config import PolicyConfig
from loong.scheduler.room import make_room


def plan_esp(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> IterationPlan:
    """Plan every cell that can run now."""
    each_alone = ((instance,) for instance in full_instances(snapshot.instances))
    cells = cells_of(snapshot, each_alone, config.lease_steps)
    cells, preempted = make_room(cells, config.lease_steps)
    cells = Dispatch(snapshot, cost_model, config).place_all(cells)
    ready = [cell for cell in cells if cell.is_ready]
    return IterationPlan(
        batches=tuple(shrunk(plan_batch(c, cost_model, config, keep_on_fewest), c.views) for c in ready),
        preemptions=tuple(Preemption(view.request_id) for view in preempted),
        lease_ends=lease_ends(cells),
    )


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which prefills run, and on which instances."""

    snapshot: Snapshot
    cost_model: CostModel
    config: PolicyConfig

    def place_all(self, cells: Sequence[Cell]) -> list[Cell]:
        """Prefills that have begun may widen; then those that wait join, until the first that has no room."""
        placed = list(cells)
        begun = sorted((v for cell in cells for v in cell.views if not v.is_decoding), key=arrival_order)
        for view in begun:
            own = next(cell for cell in placed if any(v is view for v in cell.views))
            placed = merged_into(placed, self.widened(own, view, placed) or own)
        for view in self.snapshot.waiting:
            if view.is_plannable:
                alone = Cell().joined(view, self.config.lease_steps)
                home = self.widened(alone, view, placed)
                if home is None:
                    break
                placed = merged_into(placed, home)
        return placed

    def widened(self, own: Cell, view: RequestView, cells: Iterable[Cell]) -> Cell | None:
        """`own`, with as few others as a timely first token of `view` needs, or else the soonest.

        None if there is no room anywhere.
        """
        target = view.slo.ttft if view.slo is not None else self.config.target_ttft
        soonest, least = None, float("inf")
        others = (c for c in cells if not c.is_prefilling and c.free.keys().isdisjoint(own.free))
        for cell in accumulate(sorted(others, key=_readiness), Cell.merge, initial=own):
            if cell.dop and cell.num_spare >= 0:
                ttft = self.predicted_ttft(view, cell)
                if ttft <= target:
                    return cell
                if ttft < least:
                    soonest, least = cell, ttft
        return soonest

    def predicted_ttft(self, view: RequestView, cell: Cell) -> float:
        """Seconds from arrival to first token if `cell` computes all its prompts, as one, in equal chunks."""
        num_tokens = cell.num_pending
        num_chunks = -(-num_tokens // (self.config.max_num_batched_tokens * cell.dop))
        chunk = -(-num_tokens // num_chunks)
        num_cached = view.num_computed_tokens + (num_tokens - chunk) // 2
        waited = self.snapshot.now - view.arrival_time
        return waited + num_chunks * prefill_time(self.cost_model, chunk, num_cached, cell.dop)


def shrunk(batch: BatchPlan, views: Iterable[RequestView]) -> BatchPlan:
    """The batch without instances that would have no part in it."""
    used = {block.master_id for block in batch.queries} | {s.instance_id for s in batch.writes}
    in_batch = set(batch.request_ids)
    used.update(i for view in views if view.request_id in in_batch for i in view.placement.instance_ids)
    return replace(batch, group=ESPGroup(tuple(i for i in batch.group.instance_ids if i in used)))


def _readiness(cell: Cell) -> tuple[bool, int, int, bool, int]:
    """Idle cells first, then least to prefill, fewest instances, no requests, most room."""
    return bool(cell.batches), cell.num_pending, cell.dop, bool(cell.views), -cell.num_free
