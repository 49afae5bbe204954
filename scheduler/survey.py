"""What a policy can plan with: units of instances that must go together, and the requests that rest on them.

A batch must hold all KV of its requests, so instances that share a request at rest are one unit; so are the
instances of a batch in flight, which come free together. Units that nobody shares anything with are single
instances. A unit is planned whole or not at all, so that no request ever waits for two of its instances in
turn.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot


@dataclass(slots=True)
class Unit:
    """Instances that go together, when they come free, and what rests on them.

    `available_in` is in seconds from now: 0 if idle; for a lease, the end of its present step. `batches` are
    those in flight on it. `num_decodes` counts those in flight too.
    """

    instance_ids: tuple[InstanceId, ...]
    batches: tuple[RunningBatch, ...] = ()
    available_in: float = 0.0
    decodes: list[RequestView] = field(default_factory=list)
    prefills: list[RequestView] = field(default_factory=list)
    num_decodes: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether a plan can use it now."""
        return not self.batches

    @property
    def is_in_lease(self) -> bool:
        """Whether all that it waits for can end at the edge of a step."""
        return bool(self.batches) and all(batch.plan.num_steps > 1 for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Survey:
    """The cluster, sorted for planning.

    `free` is the free slots of each full instance, once requests that have ended leave their batches.
    """

    snapshot: Snapshot
    units: tuple[Unit, ...]
    free: Mapping[InstanceId, int]
    waiting: tuple[RequestView, ...]

    @property
    def num_instances(self) -> int:
        """Full instances, idle or not."""
        return len(self.free)


def survey(snapshot: Snapshot) -> Survey:
    """Sort what is at rest by unit, and foresee when the rest comes free.

    Requests with KV on anything but full instances, in a host tier, are left alone.
    """
    free = {i.instance_id: i.kv_free for i in snapshot.instances if i.kind is InstanceKind.FULL}
    resting = []
    for view in snapshot.running:
        if view.batch_id is None:
            if not (view.is_migrating or view.has_ended):
                resting.append(view)
        elif view.has_ended:
            _free_kv_of(view, snapshot, free)
    if len(free) < len(snapshot.instances):
        resting = [view for view in resting if free.keys() >= set(view.placement.instance_ids)]
    unit_of = _units(free, snapshot.batches, resting)
    for view in resting:
        unit = unit_of[view.placement.segments[0].instance_id]
        (unit.decodes if view.is_decoding else unit.prefills).append(view)
    units = tuple({id(unit): unit for unit in unit_of.values()}.values())
    for unit in units:
        unit.num_decodes = len(unit.decodes) + sum(len(batch.plan.request_ids) for batch in unit.batches)
        if unit.batches:
            end = max(_end(batch) for batch in unit.batches)
            unit.available_in = max(0.0, end - snapshot.now)
    waiting = tuple(view for view in snapshot.waiting if view.is_plannable)
    return Survey(snapshot, units, free, waiting)


def _free_kv_of(view: RequestView, snapshot: Snapshot, free: dict[InstanceId, int]) -> None:
    """Count as free what a request that has ended holds until its batch ends."""
    batch = next(batch for batch in snapshot.batches if batch.batch_id == view.batch_id)
    for segment in (*view.placement.segments, *batch.plan.writes_of(view.request_id)):
        if segment.instance_id in free:
            free[segment.instance_id] += len(segment.positions)


def _end(batch: RunningBatch) -> float:
    """When the step that runs now ends, as far as its plan says; leases tell no other times."""
    return batch.started_at + (batch.plan.predicted_time or 0.0) * (batch.num_steps_taken + 1)


def _units(
    free: Mapping[InstanceId, int], batches: Iterable[RunningBatch], resting: Iterable[RequestView]
) -> dict[InstanceId, Unit]:
    """The unit of each instance."""
    unit_of = {instance_id: Unit((instance_id,)) for instance_id in free}
    for batch in batches:
        members = [i for i in batch.plan.group.instance_ids if i in unit_of]
        if members:
            unit = _joined(unit_of, members)
            unit.batches = (*unit.batches, batch)
    for view in resting:
        holders = view.placement.instance_ids
        if len(holders) > 1:
            _joined(unit_of, holders)
    return unit_of


def _joined(unit_of: dict[InstanceId, Unit], instance_ids: Iterable[InstanceId]) -> Unit:
    """The unit of all these, made of those that they are in."""
    parts = {id(unit_of[i]): unit_of[i] for i in instance_ids}.values()
    if len(parts) == 1:
        return next(iter(parts))
    unit = Unit(
        tuple(sorted(i for part in parts for i in part.instance_ids)),
        tuple(batch for part in parts for batch in part.batches),
    )
    for instance_id in unit.instance_ids:
        unit_of[instance_id] = unit
    return unit
