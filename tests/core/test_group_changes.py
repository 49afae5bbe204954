"""Each change of a group is a scale-up, a scale-down or a hand-over."""

from collections.abc import Set

from hypothesis import given
from hypothesis import strategies as st

from loong.core.group_changes import GroupChange, group_changes

GROUPS = st.frozensets(st.integers(0, 4), min_size=1)


def change(group: Set[int], last: Set[int], *holder_ids: int) -> GroupChange | None:
    return next(iter(group_changes(group, holder_ids, [last])), None)


def test_a_group_grows_shrinks_or_hands_over() -> None:
    assert change({0, 1}, {0}) is GroupChange.GREW
    assert change({0}, {0, 1, 2}) is GroupChange.SHRANK
    assert change({0}, {0, 1, 2}, 3) is GroupChange.SHRANK, "3 held KV before, too"
    assert change({0}, {0, 1, 2}, 1) is GroupChange.HANDED_OVER, "its KV stays where it was"
    assert change({3}, {0, 1, 2}) is GroupChange.HANDED_OVER
    assert change({2, 3}, {1, 2}) is GroupChange.HANDED_OVER
    assert change({1, 2}, {1, 2}) is None


@given(GROUPS, GROUPS, st.frozensets(st.integers(0, 4)))
def test_only_a_group_of_other_instances_has_changed(
    group: frozenset[int], last: frozenset[int], held: frozenset[int]
) -> None:
    assert len(group_changes(group, held - group, [last])) == (group != last)


@given(GROUPS, st.lists(GROUPS))
def test_a_batch_has_the_changes_of_all_its_requests(
    group: frozenset[int], lasts: list[frozenset[int]]
) -> None:
    found = frozenset[GroupChange]().union(*(group_changes(group, (), [last]) for last in lasts))
    assert group_changes(group, (), lasts) == found
