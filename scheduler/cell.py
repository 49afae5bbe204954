"""A cell: instances that would run one batch together, and the requests at rest that it would serve.

A batch must hold all KV of its requests, so instances that share a request at rest are in one cell. Planning
is merging cells; a cell of the final plan becomes one batch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot


@dataclass(frozen=True, slots=True)
class Cell:
    """While `batches` are in flight, the cell has to wait; `free` is the free slots of each instance after.

    `num_wished` is the room that its requests need to compute their prompts and one full lease, less what
    those in flight have reserved; `num_pending` the prompt tokens to compute of those at rest.
    """

    free: Mapping[InstanceId, int] = field(default_factory=dict)
    views: tuple[RequestView, ...] = ()
    batches: tuple[RunningBatch, ...] = ()
    num_wished: int = 0
    num_pending: int = 0

    @property
    def group(self) -> ESPGroup:
        """All of its instances, ascending."""
        return ESPGroup(tuple(sorted(self.free)))

    @property
    def dop(self) -> int:
        """The number of its instances."""
        return len(self.free)

    @property
    def num_free(self) -> int:
        """Free slots of all its instances."""
        return sum(self.free.values())

    @property
    def num_spare(self) -> int:
        """Slots left when every request has what it wishes; negative if they cannot."""
        return self.num_free - self.num_wished

    @property
    def num_missing(self) -> int:
        """Slots that the next step lacks: a whole prompt for each prefill, one for each decode token."""
        return sum(view.num_uncomputed_tokens for view in self.views) - self.num_free

    @property
    def is_prefilling(self) -> bool:
        """Whether it waits for a batch that cannot end early."""
        return any(batch.plan.num_steps == 1 for batch in self.batches)

    @property
    def is_ready(self) -> bool:
        """Whether it can run a batch now: it has requests, all its instances are idle and have room."""
        return bool(self.views) and not self.batches and self.num_missing <= 0

    def merge(self, other: "Cell") -> "Cell":
        """Both cells as one."""
        return Cell(
            {**self.free, **other.free},
            self.views + other.views,
            self.batches + other.batches,
            self.num_wished + other.num_wished,
            self.num_pending + other.num_pending,
        )

    def joined(self, view: RequestView, lease_steps: int) -> "Cell":
        """This cell with one more request at rest."""
        return replace(
            self,
            views=(*self.views, view),
            num_wished=self.num_wished + num_wished_tokens(view, lease_steps),
            num_pending=self.num_pending + _num_pending(view),
        )

    def without(self, view: RequestView, lease_steps: int) -> "Cell":
        """This cell after the preemption of `view`, whose KV it frees."""
        freed = view.placement.tokens_by_instance()
        return replace(
            self,
            free={i: slots + freed[i] for i, slots in self.free.items()},
            views=tuple(v for v in self.views if v.request_id != view.request_id),
            num_wished=self.num_wished - num_wished_tokens(view, lease_steps),
            num_pending=self.num_pending - _num_pending(view),
        )


def arrival_order(view: RequestView) -> tuple[float, str]:
    """First come, first served; names break ties."""
    return view.arrival_time, view.request_id


def num_wished_tokens(view: RequestView, lease_steps: int) -> int:
    """Slots for the rest of its known tokens and one full lease; never above what it may ever need."""
    return view.num_uncomputed_tokens - 1 + min(lease_steps, view.num_remaining_tokens)


def full_instances(instances: Iterable[ElasticInstance]) -> tuple[ElasticInstance, ...]:
    """The instances that can be masters; plain policies use no others."""
    return tuple(instance for instance in instances if instance.kind is InstanceKind.FULL)


def merge_touching(cells: Iterable[Cell]) -> list[Cell]:
    """The fewest merges after which no two cells share an instance."""
    apart: list[Cell] = []
    for cell in cells:
        merged = cell
        for other in [c for c in apart if c.free.keys() & cell.free.keys()]:
            apart.remove(other)
            merged = merged.merge(other)
        apart.append(merged)
    return apart


def merged_into(cells: Iterable[Cell], cell: Cell) -> list[Cell]:
    """`cells` with `cell` in the place of those that it covers."""
    return [*(other for other in cells if other.free.keys().isdisjoint(cell.free)), cell]


def cells_of(
    snapshot: Snapshot, partition: Iterable[tuple[ElasticInstance, ...]], lease_steps: int
) -> list[Cell]:
    """The finest cells that keep every part of `partition`, every batch in flight and every request whole.

    Requests with KV elsewhere, in a host tier, are left alone.
    """
    free = _free_slots(snapshot)
    cells = [Cell({i.instance_id: free[i.instance_id] for i in part}) for part in partition]
    cells += [
        Cell(
            {i: free[i] for i in batch.plan.group.instance_ids if i in free},
            batches=(batch,),
            num_wished=_num_wished_beyond(batch, snapshot, lease_steps),
        )
        for batch in snapshot.batches
    ]
    for view in snapshot.running:
        holders = view.placement.instance_ids
        if view.is_plannable and free.keys() >= set(holders):
            cells.append(Cell({i: free[i] for i in holders}).joined(view, lease_steps))
    return merge_touching(cells)


def _free_slots(snapshot: Snapshot) -> dict[InstanceId, int]:
    """Free slots of full instances, with those that requests which have ended hold until their batch ends."""
    free = {instance.instance_id: instance.kv_free for instance in full_instances(snapshot.instances)}
    held: Counter[InstanceId] = Counter()
    for view in snapshot.running:
        if view.has_ended and view.batch_id is not None:
            held.update(view.placement.tokens_by_instance())
    for batch in snapshot.batches:
        for segment in batch.plan.writes:
            if snapshot.request[segment.owner_id].has_ended:
                held[segment.instance_id] += len(segment.positions)
    return {instance_id: slots + held[instance_id] for instance_id, slots in free.items()}


def _num_wished_beyond(batch: RunningBatch, snapshot: Snapshot, lease_steps: int) -> int:
    """The room that the requests of a batch wish, less what they have reserved."""
    views = (snapshot.request[request_id] for request_id in batch.plan.request_ids)
    num_wished = sum(num_wished_tokens(view, lease_steps) for view in views if not view.has_ended)
    writes = (s for s in batch.plan.writes if not snapshot.request[s.owner_id].has_ended)
    return num_wished - sum(len(segment.positions) for segment in writes)


def _num_pending(view: RequestView) -> int:
    return 0 if view.is_decoding else view.num_uncomputed_tokens
