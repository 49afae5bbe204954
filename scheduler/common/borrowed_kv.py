"""Requests that borrow the same KV, which must count once."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

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
