"""The choice of masters: the instance that computes a decoding request's next tokens, where they fit."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from loong.core.placement import InstanceId
from loong.core.request import RequestView


def choose_masters(
    views: Sequence[RequestView], free: Mapping[InstanceId, int], num_steps: int
) -> list[tuple[RequestView, InstanceId]] | None:
    """Return a master with room for `num_steps` tokens for each decoding request, or None.

    A request keeps the instance of its newest KV while that instance has no more than its share. So its KV
    stays in few pieces. Otherwise an instance that holds some of its KV is preferred, which keeps groups
    small, and of these the master of the fewest requests.
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
        if num_requests[master_id] >= fair_share or room[master_id] < num_tokens:
            holders = [i for i in view.placement.instance_ids if room[i] >= num_tokens]
            able = holders or [i for i in room if room[i] >= num_tokens]
            if not able:
                return None
            master_id = min(able, key=lambda i: (num_requests[i], -room[i], i))
        masters.append((view, master_id))
        room[master_id] -= num_tokens
        num_requests[master_id] += 1
    return masters


def num_stored(views: Iterable[RequestView], num_steps: int) -> int:
    """Return the slots that `num_steps` decode steps take; a request takes no more than it may."""
    return sum([min(num_steps, view.num_remaining_tokens) for view in views])
