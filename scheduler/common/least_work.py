"""Assignment of waiting prompts to fixed groups: to the group with least work, and among equals most room."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from operator import attrgetter

from loong.core.decision import Alternative
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.borrowed_kv import SharedOnce
from loong.scheduler.common.cluster_parts import Parts, place_of
from loong.scheduler.common.prefix_copies import CopyChoice, PrefixCopies
from loong.scheduler.common.prompt_queue import PromptQueue
from loong.scheduler.esp.prompt_order import (
    Ordering,
    PrefillCandidate,
    considered,
    ordered,
    prefill_work,
    starved_first,
)


@dataclass(slots=True)
class Load:
    """Prompts and KV of a group of `size` instances.

    `work` is the seconds in which the whole group computes the prompts taken so far. `room` is the slots that
    are not promised to any request until its declared end.
    """

    place: int
    size: int
    capacity: int
    room: int
    work: float = 0.0
    shared: SharedOnce = field(default_factory=SharedOnce)

    @property
    def key(self) -> tuple[float, int, int]:
        """Return the sort key of groups: least work first, then most room."""
        return self.work, -self.room, self.place

    def take(self, work: float, num_tokens: int) -> None:
        """Count a prompt of `work` seconds of one instance, and its final KV."""
        self.work += work / self.size
        self.room -= num_tokens


@dataclass(frozen=True, slots=True)
class Assigned:
    """The places of the parts of requests, and the prompts without one for now (`others`).

    Those of `computing_ids` are to compute all of their prompts: another part has KV that they could read.
    Those of `copied` read it in their part, where it is too, or wait until it is there (`copying`).
    """

    places: dict[RequestId, int]
    others: Sequence[RequestView]
    computing_ids: frozenset[RequestId] = frozenset()
    copied: Mapping[RequestId, int] = field(default_factory=dict)
    copying: Mapping[RequestId, CopyChoice] = field(default_factory=dict)


class LeastWorkQueue:
    """Groups by work. Those without room for the last prompt are apart, until a smaller one comes."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads
        self._by_work = [load.key for load in loads]
        self._by_room: list[tuple[int, int]] = []  # minus the room, and the place
        heapify(self._by_work)

    def assign(self, work: float, num_tokens: int) -> Load | None:
        """Give a prompt to the group with least work that has room, or else to the one with most room.

        Return that group; None if none is large enough.
        """
        load = self._with_room(num_tokens) or self._roomiest(num_tokens)
        if load is not None:
            load.take(work, num_tokens)
            if load.room > 0:
                heappush(self._by_work, load.key)
            else:
                heappush(self._by_room, (-load.room, load.place))
        return load

    def _with_room(self, num_tokens: int) -> Load | None:
        """Remove and return the group with least work that has room, or None."""
        while self._by_room and -self._by_room[0][0] >= num_tokens:
            _, place = heappop(self._by_room)
            heappush(self._by_work, self._loads[place].key)
        while self._by_work:
            key = self._by_work[0]
            load = self._loads[key[-1]]
            if key != load.key:  # a prompt that has begun there was counted since
                heapreplace(self._by_work, load.key)
                continue
            heappop(self._by_work)
            if load.room >= num_tokens:
                return load
            heappush(self._by_room, (-load.room, load.place))
        return None

    def _roomiest(self, num_tokens: int) -> Load | None:
        """Remove and return the large enough group with most room, or None. All groups are in `_by_room`."""
        too_small, found = [], None
        while self._by_room and found is None:
            key = heappop(self._by_room)
            load = self._loads[key[-1]]
            if load.capacity >= num_tokens:
                found = load
            else:
                too_small.append(key)
        for key in too_small:
            heappush(self._by_room, key)
        return found


def assigned_places(
    snapshot: Snapshot,
    waiting: Sequence[RequestView],
    parts: Parts,
    homes: Mapping[RequestId, int],
    ordering: Ordering,
    copies: PrefixCopies | None = None,
) -> Assigned:
    """Assign each request to a part.

    `waiting` are the prompts that fit into the cluster, and `homes` the places of running requests. Prompts
    choose in the order of their deadlines, deferred ones last and starved ones first: the group that one
    waits for then drains, and stays the one with most room. If many wait, only those that admission considers
    get a place. Where no group has room, a prompt waits for the group with most room. One of which a group
    has cached KV goes there, unless another begins and computes all of it before that. With `copies` it goes
    to one that has a copy, or is to have one, if its first token comes sooner there.
    """
    live = [view for view in snapshot.running if not view.has_ended]
    if len(parts) == 1:
        return Assigned({**{view.request_id: 0 for view in (*waiting, *live)}, **homes}, ())
    loads = _loads(snapshot, parts, homes)
    computing = [v for v in live if not v.is_decoding and (v.is_plannable or v.request_id in homes)]
    prefills, others = _in_order(snapshot, waiting, computing, ordering)
    groups, places, place_at = LeastWorkQueue(loads), {**homes}, place_of(parts)
    computing_ids, copied, copying = set[RequestId](), dict[RequestId, int](), dict[RequestId, CopyChoice]()
    for prefill in prefills:
        request_id = prefill.view.request_id
        if request_id in homes:
            loads[homes[request_id]].take(prefill.work, 0)
            continue
        work, num_tokens = prefill.work, prefill.view.num_final_tokens
        if prefill.view.cached:
            cached_at = loads[place_at[prefill.view.cached[0].segment.instance_id]]
            work = prefill_work(prefill.num_tokens + prefill.num_cached, 0, ordering.alone)
            soonest = min(load.work for load in loads) + work / cached_at.size
            if copies is not None and (choice := _copied(prefill, cached_at, soonest, loads, copies)):
                loads[choice.place].take(prefill.work, num_tokens)
                if choice.missing:
                    copying[request_id] = choice
                else:
                    places[request_id] = copied[request_id] = choice.place
                continue
            if _is_read_there(prefill, cached_at, soonest):
                places[request_id] = cached_at.place
                continue
            computing_ids.add(request_id)
        if (load := groups.assign(work, num_tokens)) is not None:
            places[request_id] = load.place
    return Assigned(places, others, frozenset(computing_ids), copied, copying)


def _in_order(
    snapshot: Snapshot, waiting: Sequence[RequestView], computing: Sequence[RequestView], ordering: Ordering
) -> tuple[Iterable[PrefillCandidate], Sequence[RequestView]]:
    """Return the prompts that choose a group, in their order, and those that are not considered."""
    capacity = sum(snapshot.pools.values())
    queue = PromptQueue(snapshot.now, len(snapshot.pools), capacity, waiting, computing, snapshot.running)
    chosen, others = considered(queue, ordering.config)
    prefills = ordered((*chosen, *computing), queue, ordering)
    return starved_first(prefills, snapshot.now), others


def _is_read_there(prefill: PrefillCandidate, cached_at: Load, again: float) -> bool:
    """Return whether a prompt reads KV in the group that has it, which takes it then.

    It does not if its first token came sooner, after `again` seconds, were it computed whole.
    """
    num_more = cached_at.shared.num_more(prefill.view)
    if cached_at.room < num_more or cached_at.work + prefill.work / cached_at.size > again:
        return False
    cached_at.take(prefill.work, num_more)
    cached_at.shared.add(prefill.view)
    return True


def _copied(
    prefill: PrefillCandidate, cached_at: Load, again: float, loads: Sequence[Load], copies: PrefixCopies
) -> CopyChoice | None:
    """Return another group where a prompt that could read cached KV has its first token soonest, if any.

    That is one with a copy, or the one with least work, which gets a copy. `again` are the seconds to the
    first token of a prompt that is computed whole.
    """
    view = prefill.view
    has_room = cached_at.room >= cached_at.shared.num_more(view)
    in_place = cached_at.work + prefill.work / cached_at.size if has_room else inf
    others = [load for load in loads if load is not cached_at and load.room >= view.num_final_tokens]
    least = min(others, key=attrgetter("key"), default=None)
    best: tuple[float, CopyChoice] | None = None
    for load in others:
        if load.work >= min(in_place, again):
            continue
        missing = copies.missing(view, load.place)
        if missing and load is not least:
            continue
        seconds = copies.seconds(missing, load.place)
        cost = max(load.work, seconds) + prefill.work / load.size
        gain = min(in_place, again) - cost
        if gain > 0 and (best is None or cost < best[0]) and copies.pays(missing, seconds, gain):
            costs = {"read where it is": in_place, "computed again": again, "copied": cost}
            alternatives = tuple([Alternative(what, seconds) for what, seconds in costs.items()])
            best = cost, CopyChoice(load.place, missing, alternatives)
    return None if best is None else best[1]


def _loads(snapshot: Snapshot, parts: Parts, homes: Mapping[RequestId, int]) -> list[Load]:
    """Return the groups without work, and without room for the final KV of their requests."""
    capacities = [sum(snapshot.pools[i] for i in part) for part in parts]
    loads = [
        Load(place, len(part), room, room)
        for place, (part, room) in enumerate(zip(parts, capacities, strict=True))
    ]
    for instance_id, place in place_of(parts).items():
        loads[place].room -= snapshot.leaving.get(instance_id, 0)
    for view in snapshot.running:
        if view.request_id in homes and not view.has_ended:
            load = loads[homes[view.request_id]]
            load.room -= load.shared.add(view) if view.borrowed else view.num_final_tokens
    return loads
