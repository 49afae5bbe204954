"""Requests that borrow the same KV, which must count once; a copy on another instance counts, too."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from loong.core.placement import InstanceId, OwnerId
from loong.core.request import RequestId, RequestView

Place: TypeAlias = tuple[OwnerId, InstanceId]


def borrowed_by_last(
    views: Iterable[RequestView], num_to_come: Callable[[RequestView], int]
) -> Mapping[RequestId, int]:
    """Return the borrowed tokens of each place, by its user with most to come, which reads them last."""
    last: dict[Place, tuple[RequestView, int]] = {}
    for view in views:
        for place, num_tokens in borrowed_at(view):
            if place not in last or num_to_come(view) > num_to_come(last[place][0]):
                last[place] = view, num_tokens
    tokens: Counter[RequestId] = Counter()
    for view, num_tokens in last.values():
        tokens[view.request_id] += num_tokens
    return tokens


def borrowed_at(view: RequestView) -> Iterator[tuple[Place, int]]:
    """Yield the places where a request borrows KV, with the number of tokens."""
    for part in view.borrowed:
        for instance_id, num_tokens in part.placement.tokens_by_instance().items():
            yield (part.owner_id, instance_id), num_tokens


@dataclass(slots=True)
class SharedOnce:
    """Sums the KV of requests until their declared ends; what several borrow at one place counts once.

    It is an upper bound at any time: KV of an owner stays until the last request that reads it has ended.
    """

    num_tokens: int = 0
    at_place: dict[Place, int] = field(default_factory=dict)

    def num_more(self, view: RequestView) -> int:
        """Return the slots that one more request adds."""
        if not view.borrowed:  # as most
            return view.num_final_tokens
        known = sum([min(num, self.at_place.get(place, 0)) for place, num in borrowed_at(view)])
        return view.num_final_tokens - known

    def add(self, view: RequestView) -> int:
        """Add a request, and return the slots that it adds."""
        num_more = self.num_more(view)
        self.num_tokens += num_more
        for place, num_tokens in borrowed_at(view):
            self.at_place[place] = max(self.at_place.get(place, 0), num_tokens)
        return num_more
