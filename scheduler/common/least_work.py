"""Assignment of waiting prompts to fixed groups: to the group with least work, and among equals most room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, home_of, place_of
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import Order, PrefillAdmission

_Key: TypeAlias = tuple[float, int, int]
"""The work of a group, minus its room, and its place."""


@dataclass(slots=True)
class Load:
    """Prompts and KV of a group of `size` instances.

    `work` is the seconds in which the whole group computes the prompts taken so far. `num_promised` is the
    slots of its requests once all have come to their declared ends.
    """

    place: int
    size: int
    capacity: int
    work: float = 0.0
    num_promised: int = 0

    @property
    def room(self) -> int:
        """Return the slots that are not promised to any request."""
        return self.capacity - self.num_promised

    @property
    def key(self) -> _Key:
        """Return the sort key of groups."""
        return self.work, -self.room, self.place

    def take(self, work: float, num_tokens: int) -> None:
        """Count a prompt of `work` seconds of one instance, and its final KV."""
        self.work += work / self.size
        self.num_promised += num_tokens


def assigned_places(
    found: PlanningView, parts: Parts, cost_model: CostModel, config: PolicyConfig, order: Order
) -> tuple[dict[RequestId, int], Sequence[RequestView]]:
    """Return the place of the part that each prompt goes to, and the prompts without a part for now.

    Prompts choose in the order of their deadlines, deferred ones last. If many wait, only those that
    admission considers get a place. Where no group has room, a prompt waits for the group with most room.
    """
    snapshot = found.snapshot
    live = [view for view in snapshot.running if not view.has_ended]
    if len(parts) == 1:
        return {view.request_id: 0 for view in (*found.waiting, *live)}, ()
    home = {view.request_id: home_of(view, snapshot, parts) for view in live}
    place_by_id = {request_id: at for request_id, at in home.items() if at is not None}
    loads = _loads(snapshot, parts, place_by_id)
    admission = PrefillAdmission(found, cost_model, config, order)
    considered, others = admission.considered()
    computing = (v for v in live if v.is_plannable or v.request_id in place_by_id)
    computing = (v for v in computing if not v.is_decoding)
    queue, assigned = [load.key for load in loads], dict[RequestId, int]()
    heapify(queue)
    for prefill in admission.ordered((*considered, *computing)):
        request_id, num_tokens = prefill.view.request_id, prefill.view.num_final_tokens
        if request_id in place_by_id:
            load = loads[place_by_id[request_id]]
            load.take(prefill.work, 0)
        elif (chosen := _chosen(loads, queue, num_tokens)) is not None:
            load, assigned[request_id] = chosen, chosen.place
            load.take(prefill.work, num_tokens)
        else:
            continue
        heappush(queue, load.key)
    return assigned, others


def _loads(snapshot: Snapshot, parts: Parts, place_by_id: Mapping[RequestId, int]) -> list[Load]:
    """Return the groups without work, with the final KV of their requests."""
    loads = [
        Load(number, len(part), sum(snapshot.pools[i] for i in part)) for number, part in enumerate(parts)
    ]
    for instance_id, at in place_of(parts).items():
        loads[at].num_promised += snapshot.leaving.get(instance_id, 0)
    for request_id, at in place_by_id.items():
        loads[at].num_promised += snapshot.request[request_id].num_final_tokens
    return loads


def _chosen(loads: Sequence[Load], queue: list[_Key], num_tokens: int) -> Load | None:
    """Return the group with least work that has room, or the one with most room.

    None if none is large enough.

    Outdated keys of the queue are dropped: each change of a group has added a new one.
    """
    without_room: list[_Key] = []
    chosen = None
    while queue and chosen is None:
        load = loads[queue[0][-1]]
        if queue[0] != load.key:
            heappop(queue)
        elif load.room >= num_tokens:
            chosen = load
        else:
            without_room.append(heappop(queue))
    for key in without_room:
        heappush(queue, key)
    if chosen is not None:
        return chosen
    able = [load for load in loads if load.capacity >= num_tokens]
    return max(able, key=lambda load: (load.room, -load.place), default=None)
