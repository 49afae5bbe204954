"""The choice of masters: the instance that computes a decoding request's next tokens, where they fit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot

Masters: TypeAlias = list[tuple[RequestView, InstanceId]]
PreferredIds: TypeAlias = Callable[[RequestView], Iterable[InstanceId]]


def holder_ids(view: RequestView) -> Iterable[InstanceId]:
    """Prefer the instances that hold KV of a request, which keeps groups small."""
    return view.placement.instance_ids


def on_hosts_of_kv(snapshot: Snapshot) -> PreferredIds:
    """Prefer the instances of the hosts that hold KV of a request, so that it stays on these hosts."""
    instance = snapshot.instance

    def preferred(view: RequestView) -> Iterable[InstanceId]:
        hosts = {instance[i].host_id for i in view.placement.instance_ids}
        return (i for i in snapshot.pools if instance[i].host_id in hosts)

    return preferred


def no_instances(_view: RequestView) -> Iterable[InstanceId]:
    """Prefer no instance, which spreads masters evenly."""
    return ()


def choose_masters(
    views: Sequence[RequestView],
    free: Mapping[InstanceId, int],
    num_steps: int,
    preferred_ids: PreferredIds = holder_ids,
) -> Masters | None:
    """Return a master with room for `num_steps` tokens for each decoding request, or None.

    A request keeps the instance of its newest KV while that instance has no more than its share. So its KV
    stays in few pieces. Otherwise its master is one of its `preferred_ids` if any of them has room, and of
    these the master of the fewest requests.
    """
    room = dict(free)
    if num_stored(views, num_steps) > sum(room.values()):
        return None
    if len(room) == 1:
        (only_id,) = room
        return [(view, only_id) for view in views]
    num_requests, fair_share = dict.fromkeys(room, 0), ceil(len(views) / len(room))
    masters = []
    for view in views:
        num_tokens = min(num_steps, view.num_remaining_tokens)
        master_id = view.placement.segments[-1].instance_id
        if num_requests.get(master_id, fair_share) >= fair_share or room[master_id] < num_tokens:
            preferred = [i for i in preferred_ids(view) if room.get(i, 0) >= num_tokens]
            able = preferred or [i for i in room if room[i] >= num_tokens]
            if not able:
                return None
            master_id = min(able, key=lambda i: (num_requests[i], -room[i], i))
        masters.append((view, master_id))
        room[master_id] -= num_tokens
        num_requests[master_id] += 1
    return masters


def choose_lease(
    views: Sequence[RequestView],
    free: Mapping[InstanceId, int],
    most_steps: int,
    preferred_ids: PreferredIds = holder_ids,
) -> tuple[int, Masters] | None:
    """Return the steps of a lease of all `views`, and the masters that have room for them.

    A lease has `most_steps` at most, and half as many as often as slots are too few. None if they are too few
    for one step.
    """
    num_steps = min(most_steps, max(view.num_remaining_tokens for view in views))
    while (masters := choose_masters(views, free, num_steps, preferred_ids)) is None:
        num_steps //= 2
        if not num_steps:
            return None
    return num_steps, masters


def num_stored(views: Iterable[RequestView], num_steps: int) -> int:
    """Return the slots that `num_steps` decode steps take; a request takes no more than it may."""
    return sum([min(num_steps, view.num_remaining_tokens) for view in views])
