"""Requests that borrow the same KV, which must count once."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from loong.core.placement import BorrowedKV, OwnerId
from loong.core.request import RequestId, RequestView


def borrowed_by_last(
    views: Iterable[RequestView], num_to_come: Callable[[RequestView], int]
) -> Mapping[RequestId, int]:
    """Return the borrowed tokens of each owner, by its user with most to come, which reads them last."""
    last: dict[OwnerId, tuple[RequestView, BorrowedKV]] = {}
    for view in views:
        for part in view.borrowed:
            if part.owner_id not in last or num_to_come(view) > num_to_come(last[part.owner_id][0]):
                last[part.owner_id] = view, part
    tokens: Counter[RequestId] = Counter()
    for view, part in last.values():
        tokens[view.request_id] += part.placement.num_tokens
    return tokens


@dataclass(slots=True)
class SharedOnce:
    """Sums the KV of requests until their declared ends; what several borrow of an owner counts once.

    It is an upper bound at any time: KV of an owner stays until the last request that reads it has ended.
    """

    num_tokens: int = 0
    of_owner: dict[OwnerId, int] = field(default_factory=dict)

    def num_more(self, view: RequestView) -> int:
        """Return the slots that one more request adds."""
        if not view.borrowed:  # as most
            return view.num_final_tokens
        known = sum([min(p.placement.num_tokens, self.of_owner.get(p.owner_id, 0)) for p in view.borrowed])
        return view.num_final_tokens - known

    def add(self, view: RequestView) -> int:
        """Add a request, and return the slots that it adds."""
        num_more = self.num_more(view)
        self.num_tokens += num_more
        for part in view.borrowed:
            known = self.of_owner.get(part.owner_id, 0)
            self.of_owner[part.owner_id] = max(known, part.placement.num_tokens)
        return num_more
