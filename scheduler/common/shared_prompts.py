"""Requests that share the KV of their prompt, which must count once."""

from collections.abc import Callable, Iterable

from loong.core.request import RequestId, RequestView


def shared_by_last(
    views: Iterable[RequestView], num_to_come: Callable[[RequestView], int]
) -> dict[RequestId, int]:
    """Return the shared tokens of each prompt, by its choice with most to come, which holds them last."""
    last: dict[RequestId, RequestView] = {}
    for view in views:
        if view.primary_id is not None:
            other = last.get(view.primary_id)
            if other is None or num_to_come(view) > num_to_come(other):
                last[view.primary_id] = view
    return {view.request_id: view.shared.num_tokens for view in last.values()}
