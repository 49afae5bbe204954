"""The homes of new requests, first come, first served, as in `vllm-m`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.scheduler.infinite.homes import Home, num_unpromised


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests that wait for room at a home, in order, and the `home` of the first; None if there is none."""

    views: Sequence[RequestView]
    home: Home | None


def admit(waiting: Iterable[RequestView], homes: Mapping[InstanceId, Home], max_tokens: int) -> Refused:
    """Give `waiting` requests homes, in their order.

    A request takes the home with least memory in use. If that has no room until the end of the request, it
    takes no later one either, so that it has room at last. A request that fits no instance needs the room
    of several; until it finds that, no later one begins. A home takes no more once `max_tokens` of prompts
    join there.
    """
    open_homes, most = list(homes.values()), max((home.pool for home in homes.values()), default=0)
    views, first = list[RequestView](), list[Home]()
    for view in waiting:
        if view.num_final_tokens > most:
            home = _home_of_long(view, open_homes, homes)
            if home is None:
                open_homes.clear()
            else:
                home.spread.append(view)
                home.num_open += view.num_final_tokens
                open_homes.remove(home)
        elif able := [home for home in open_homes if home.pool >= view.num_final_tokens]:
            home = min(able, key=lambda home: (home.num_in_use, home.instance_id))
            has_room = _has_room(home, view, homes)
            if has_room:
                home.group.join(view)
            else:
                views.append(view)
                first.append(home)
            if not has_room or home.group.num_joining_tokens >= max_tokens:
                open_homes.remove(home)
        if not open_homes:
            break
    return Refused(views, first[0] if first else None)


def _has_room(home: Home, view: RequestView, homes: Mapping[InstanceId, Home]) -> bool:
    """Return whether a request fits its home, and leaves those that are spread enough."""
    if not home.group.has_room_for(view):
        return False
    is_any_spread = any(other.num_open for other in homes.values())
    return not is_any_spread or num_unpromised(homes.values()) >= view.num_final_tokens


def _home_of_long(
    view: RequestView, open_homes: Sequence[Home], homes: Mapping[InstanceId, Home]
) -> Home | None:
    """Return the home with most room for a request that all instances have room for together."""
    if not open_homes or num_unpromised(homes.values()) < view.num_final_tokens:
        return None
    home = max(open_homes, key=lambda home: (home.num_room, -home.instance_id))
    return home if home.num_room else None
