from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loong.core.positions import (
    coalesce,
    difference,
    first_overlap,
    intersection,
    is_partition,
    is_subset,
    stripe,
    subtract,
)

laws = settings(max_examples=300)
ranges = st.builds(range, st.integers(0, 40), st.integers(0, 60), st.integers(1, 12))
many = st.lists(ranges, max_size=5)


def members(pieces: tuple[range, ...] | list[range]) -> list[int]:
    return sorted(position for piece in pieces for position in piece)


@laws
@given(ranges, ranges)
def test_the_intersection_has_the_common_members(a: range, b: range) -> None:
    assert list(intersection(a, b)) == sorted(set(a) & set(b))


@laws
@given(ranges, ranges)
def test_the_difference_has_each_other_member_once_and_no_empty_range(a: range, b: range) -> None:
    pieces = difference(a, b)
    assert members(pieces) == sorted(set(a) - set(b))
    assert all(pieces)


@laws
@given(ranges, ranges)
def test_a_difference_never_has_more_ranges_than_gaps_between_what_is_taken(a: range, b: range) -> None:
    assert len(difference(a, b)) <= len(intersection(a, b)) + 1


def test_taking_two_far_positions_from_a_long_prompt_leaves_three_ranges() -> None:
    assert difference(range(2_000_000), range(1, 2_000_000, 1_500_000)) == (
        range(1),
        range(2, 1_500_001),
        range(1_500_002, 2_000_000),
    )


@laws
@given(many, ranges)
def test_subtracting_takes_a_range_from_each_of_several(pieces: list[range], removed: range) -> None:
    left = Counter(members(pieces))
    assert Counter(members(subtract(pieces, removed))) == Counter(
        {position: count for position, count in left.items() if position not in removed}
    )


@laws
@given(ranges, ranges)
def test_a_subset_has_no_member_outside(a: range, b: range) -> None:
    assert is_subset(a, b) == (set(a) <= set(b))


@laws
@given(many)
def test_the_first_overlap_is_shared_by_two_and_found_whenever_there_is_one(pieces: list[range]) -> None:
    counts = Counter(members(pieces))
    shared = first_overlap(pieces)
    if shared is None:
        assert all(count == 1 for count in counts.values())
    else:
        assert shared
        assert all(counts[position] > 1 for position in shared)


@laws
@given(many, ranges)
def test_a_partition_has_every_member_once_and_nothing_else(pieces: list[range], whole: range) -> None:
    assert is_partition(pieces, whole) == (members(pieces) == list(whole))


@laws
@given(
    st.integers(0, 30), st.integers(0, 60), st.lists(ranges, max_size=3), st.randoms(use_true_random=False)
)
def test_any_cutting_of_a_range_is_a_partition_of_it(
    start: int, length: int, cuts: list[range], shuffle: st.DataObject
) -> None:
    whole = range(start, start + length)
    pieces: tuple[range, ...] = (whole,)
    for cut in cuts:
        pieces = tuple(p for piece in pieces for p in (intersection(piece, cut), *difference(piece, cut)))
    assert is_partition(pieces, whole)
    assert not is_partition((*pieces, range(start, start + 1)), whole)


@laws
@given(ranges, st.integers(1, 9))
def test_stripes_partition_any_progression(positions: range, count: int) -> None:
    stripes = [stripe(positions, index, count) for index in range(count)]
    assert is_partition(stripes, positions)
    assert max(map(len, stripes)) - min(map(len, stripes)) <= 1


@laws
@given(many)
def test_coalescing_keeps_every_position_and_never_adds_a_range(pieces: list[range]) -> None:
    joined = coalesce(pieces)
    assert members(joined) == members(pieces)
    assert len(joined) <= len([piece for piece in pieces if piece])
    assert [piece[0] for piece in joined] == sorted(piece[0] for piece in joined)


@laws
@given(ranges, st.lists(st.integers(0, 60), max_size=4), st.integers(1, 9), st.data())
def test_coalescing_restores_a_range_that_was_cut_crosswise(
    whole: range, cuts: list[int], count: int, data: st.DataObject
) -> None:
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(edges)]
    assert coalesce(data.draw(st.permutations(pieces))) == ((whole,) if whole else ())


def test_single_positions_join_if_they_are_neighbors_or_in_one_stripe() -> None:
    assert coalesce((range(4, 5, 3), range(5, 6, 7))) == (range(4, 6),)
    assert coalesce((range(4, 5), range(8, 9))) == (range(4, 5), range(8, 9))
    assert coalesce((range(4, 8, 4), range(8, 12, 4))) == (range(4, 12, 4),)
