"""The home of each request: the instance that computes it, with the room that its KV takes there.

KV on other instances is lent room. It stays there until the request ends or the KV is moved.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.plan import BatchPlan
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.baselines.fixed_groups import FixedGroup
from loong.scheduler.common.leases import arrival_order
from loong.scheduler.common.planning_view import PlanningView


@dataclass(frozen=True, slots=True)
class Holding:
    """A request and its slots on each instance, those that its batch has reserved included.

    KV on its way counts at its destination.
    """

    view: RequestView
    home_id: InstanceId
    held: Counter[InstanceId]

    @property
    def num_to_come(self) -> int:
        """Return the slots that it may still take until its end."""
        return self.view.num_final_tokens - self.held.total()

    @property
    def local(self) -> RequestView:
        """Return the view of a request that is shorter by the KV on other instances."""
        num_lent = self.held.total() - self.held[self.home_id]
        if not num_lent:
            return self.view
        return replace(self.view, num_prompt_tokens=self.view.num_prompt_tokens - num_lent)


@dataclass(slots=True)
class Home:
    """An instance and the requests at home there. All sizes are tokens of KV.

    `group` has those that end within its room, by their KV there alone; its capacity is without the KV of
    all others. `spread` are the others that are at rest: their next KV goes wherever nobody needs the room.
    All of these need `num_open` more slots. `num_ended` slots are those of requests that have ended, and free
    once their batches end, and `num_departing` those of KV that is moving away. `residents` are all
    requests at home that have not ended, and `hosted` those at home elsewhere that have KV here.
    """

    instance_id: InstanceId
    pool: int
    group: FixedGroup
    spread: list[RequestView]
    num_open: int
    num_ended: int
    num_departing: int
    residents: Sequence[Holding]
    hosted: list[Holding] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        """Return the free slots."""
        return self.group.num_free

    @property
    def num_room(self) -> int:
        """Return the free slots that no request of the group ever needs."""
        return max(0, min(self.group.num_unpromised, self.num_free))

    @property
    def num_in_use(self) -> int:
        """Return the slots in use once the requests that join now are computed, and KV has moved."""
        return self.pool - self.num_free - self.num_ended - self.num_departing + self.group.num_joining_tokens

    @property
    def num_free_at_boundary(self) -> int:
        """Return the free slots once its lease has ended after the present step."""
        num_unspent = self.num_ended
        for batch in self.group.batches:
            reserved = batch.plan.num_written_tokens
            live = (h.view.request_id for h in self.residents if h.view.batch_id == batch.batch_id)
            num_unspent += sum(max(0, reserved[r] - batch.num_steps_taken - 1) for r in live)
        return self.num_free + num_unspent

    @property
    def is_lent_room(self) -> bool:
        """Return whether other instances keep KV of requests at home here."""
        return any(h.held.total() > h.held[self.instance_id] for h in self.residents)

    @property
    def is_waiting_for_moves(self) -> bool:
        """Return whether the others would need too much if they advanced without those whose KV moves."""
        are_moving = any(h.view.is_migrating and h.view.batch_id is None for h in self.residents)
        return are_moving and self.group.num_promised > self.group.capacity

    @property
    def decodes(self) -> list[RequestView]:
        """Return all its decodes, in flight or not."""
        return [h.view for h in self.residents if _has_prompt(h.view)]

    @property
    def prompts(self) -> list[RequestView]:
        """Return the requests at rest whose prompts are to be computed, the oldest first."""
        spread = [view for view in self.spread if not view.is_decoding]
        return sorted(self.group.prefills + self.group.joining + spread, key=arrival_order)


def homes_of(found: PlanningView) -> dict[InstanceId, Home]:
    """Return the homes of all full instances."""
    by_home: dict[InstanceId, list[Holding]] = {instance_id: [] for instance_id in found.free}
    holdings = list(_holdings(found.snapshot, found.free))
    for holding in holdings:
        by_home[holding.home_id].append(holding)
    departing = tokens_by_instance(m.segment for m in found.snapshot.migrations)
    homes = {i: _home(i, residents, found, departing[i]) for i, residents in by_home.items()}
    for holding in holdings:
        for instance_id in holding.held.keys() - {holding.home_id}:
            homes[instance_id].hosted.append(holding)
    return homes


def num_unpromised(homes: Iterable[Home]) -> int:
    """Return the slots of all homes that no request needs, those that are spread included."""
    return sum(home.group.num_unpromised - home.num_open for home in homes)


def _holdings(snapshot: Snapshot, full: Mapping[InstanceId, int]) -> Iterator[Holding]:
    moving: dict[RequestId, Counter[InstanceId]] = {}
    for migration in snapshot.migrations:
        counts = moving.setdefault(migration.segment.owner_id, Counter())
        num_tokens = len(migration.segment.positions)
        counts[migration.segment.instance_id] -= num_tokens
        counts[migration.destination_id] += num_tokens
    for view in sorted(snapshot.running, key=arrival_order):
        batch = None if view.batch_id is None else snapshot.batch[view.batch_id].plan
        held = Counter(view.placement.tokens_by_instance())
        if batch is not None:
            held.update(tokens_by_instance(batch.writes_of(view.request_id)))
        held.update(moving.get(view.request_id, {}))
        if not view.has_ended and full.keys() >= held.keys():
            yield Holding(view, _home_id(view, batch), held)


def _home_id(view: RequestView, batch: BatchPlan | None) -> InstanceId:
    if batch is not None:
        return batch.group.leader_id
    return max(view.placement.segments, key=lambda segment: segment.positions[-1]).instance_id


def _home(
    instance_id: InstanceId, residents: Sequence[Holding], found: PlanningView, num_departing: int
) -> Home:
    """Return the home of these requests. Where they need too much, the last to come are spread."""
    pool, batch_id = found.snapshot.pools[instance_id], found.snapshot.instance[instance_id].batch_id
    batches = [] if batch_id is None else [found.snapshot.batch[batch_id]]
    num_free = found.snapshot.free[instance_id]
    num_ended = found.free[instance_id] - num_free
    spread = [h for h in residents if h.view.num_final_tokens > pool]
    staying = [h for h in residents if h.view.num_final_tokens <= pool]
    group = _group(instance_id, staying, num_free, num_ended + num_departing, batches)
    while staying and group.num_promised > group.capacity and group.num_unpromised < 0:
        spread.append(staying.pop())
        group = _group(instance_id, staying, num_free, num_ended + num_departing, batches)
    at_rest = sorted((h.view for h in spread if h.view.is_plannable), key=arrival_order)
    num_open = sum(map(attrgetter("num_to_come"), spread))
    return Home(instance_id, pool, group, at_rest, num_open, num_ended, num_departing, residents)


def _group(
    instance_id: InstanceId,
    staying: Iterable[Holding],
    num_free: int,
    num_freed: int,
    batches: list[RunningBatch],
) -> FixedGroup:
    group = FixedGroup((instance_id,), num_free + num_freed, {instance_id: num_free}, batches)
    for holding in staying:
        view = holding.view
        group.capacity += holding.held[instance_id]
        # Slots that choices share count for each, in use and promised.
        is_alone = not (view.borrowed or view.num_siblings)
        group.hold(holding.local, is_in_step=is_alone and _has_prompt(view))
        if view.is_plannable:
            (group.decodes if view.is_decoding else group.prefills).append(view)
    return group


def _has_prompt(view: RequestView) -> bool:
    """Return whether a request decodes, in flight or not."""
    is_computed = view.num_computed_tokens >= view.num_prompt_tokens and not view.has_holes
    return is_computed and view.num_output_tokens > 0
