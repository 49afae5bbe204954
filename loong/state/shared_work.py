"""Live requests that need the KV of the same token next: one computes it for all."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from loong.core.placement import OwnerId
from loong.core.request import RequestId
from loong.state.live_request import LiveRequest

_Place: TypeAlias = tuple[OwnerId, int]


class SharedWork:
    """Requests by the position that they need next, of the owner of its token.

    Of those at one place the first goes on: one in flight, else the one with the highest priority. Of these
    it is the one that has least to compute, so that a short prompt does not wait for a long one. Those of the
    others that may borrow follow it.
    """

    def __init__(self) -> None:
        self._place_of: dict[RequestId, _Place] = {}
        self._at: dict[_Place, dict[RequestId, LiveRequest]] = {}

    def update(self, lives: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Take requests that are new or have changed. Return those that follow another now, or no more."""
        places = dict[_Place, None]()
        for live in lives:
            if not live.path or live.ending_id is not None:
                continue  # what it needs next is known once its batch has ended
            request_id = live.request.request_id
            place = None if live.has_ended else live.next_missing()
            if place != self._place_of.get(request_id):
                places.update(dict.fromkeys(self._leave(live)))
                if place is not None:
                    self._place_of[request_id] = place
                    self._at.setdefault(place, {})[request_id] = live
            if place is not None:
                places[place] = None
        return [live for place in places for live in self._changed(place)]

    def drop(self, live: LiveRequest) -> list[LiveRequest]:
        """Forget a request. Return those that end to follow it, or begin to follow another."""
        return [other for place in self._leave(live) for other in self._changed(place)]

    def _leave(self, live: LiveRequest) -> Iterator[_Place]:
        place = self._place_of.pop(live.request.request_id, None)
        if place is not None:
            del self._at[place][live.request.request_id]
            if not self._at[place]:
                del self._at[place]
            live.is_following = False
            yield place

    def _changed(self, place: _Place) -> Iterator[LiveRequest]:
        group = self._at.get(place, {}).values()
        first = min(group, key=_rank, default=None)
        for live in group:
            is_following = live is not first and live.may_borrow
            if live.is_following != is_following:
                live.is_following = is_following
                yield live


def _rank(live: LiveRequest) -> tuple[bool, int, int, int]:
    num_tokens = len(live.request.prompt_token_ids) + len(live.output_token_ids) - live.placement.num_tokens
    return live.batch_id is None, -live.request.priority, num_tokens, live.number
