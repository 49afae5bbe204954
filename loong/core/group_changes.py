"""The changes of a request's group from one batch to the next."""

from collections.abc import Iterable, Set
from enum import Enum

from loong.core.placement import InstanceId


class GroupChange(Enum):
    """A way in which the next batch of a request runs on other instances."""

    GREW = "grew"  # scale-up: instances joined, and none left
    SHRANK = "shrank"  # scale-down: instances left, and its KV is on those that stayed
    HANDED_OVER = "handed over"  # others took over, or those that left still serve its KV


def group_changes(
    group: Set[InstanceId], holder_ids: Iterable[InstanceId], last_groups: Iterable[Set[InstanceId]]
) -> frozenset[GroupChange]:
    """Return the changes to `group`, which `holder_ids` serve, from the last groups of its requests."""
    return frozenset(
        _change(group, holder_ids, last) for last in frozenset(map(frozenset, last_groups)) if last != group
    )


def _change(group: Set[InstanceId], holder_ids: Iterable[InstanceId], last: Set[InstanceId]) -> GroupChange:
    if last < group:
        return GroupChange.GREW
    return GroupChange.SHRANK if group < last and last.isdisjoint(holder_ids) else GroupChange.HANDED_OVER
