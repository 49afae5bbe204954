"""Requests that share the KV of their prompt, counted so that it counts once."""

from collections.abc import Callable, Iterable

from loong.core.request import RequestId, RequestView


def shared_by_last(
    views: Iterable[RequestView], num_to_come: Callable[[RequestView], int]
) -> dict[RequestId, int]:
    """What each family shares, by the one of it with most to come, which is the last to hold it."""
    last: dict[RequestId, RequestView] = {}
    for view in views:
        if view.family_id is not None:
            other = last.get(view.family_id)
            if other is None or num_to_come(view) > num_to_come(other):
                last[view.family_id] = view
    return {view.request_id: view.shared.num_tokens for view in last.values()}
