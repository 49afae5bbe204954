from collections import Counter
from itertools import pairwise

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from loong.core.positions import (
    at_or_after,
    coalesce,
    common,
    cut,
    dealt,
    difference,
    first_of,
    first_overlap,
    intersection,
    is_partition,
    is_within,
    joining,
    num_below,
    num_ordered_pairs,
    stripe,
    subtract,
)

laws = examples(37, thorough=600)
ranges = st.builds(range, st.integers(0, 40), st.integers(0, 60), st.integers(1, 12))
many = st.lists(ranges, max_size=5)


def members(pieces: tuple[range, ...] | list[range]) -> list[int]:
    return sorted(position for piece in pieces for position in piece)


@laws
@given(ranges, ranges)
def test_the_intersection_has_the_common_members(a: range, b: range) -> None:
    assert list(intersection(a, b)) == sorted(set(a) & set(b))


@laws
@given(many, st.integers(-5, 70))
def test_members_from_a_position_on_are_those_that_are_not_before_it(pieces: list[range], first: int) -> None:
    assert members(at_or_after(pieces, first)) == [p for p in members(pieces) if p >= first]


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
@given(many, many)
def test_subtracting_takes_several_ranges_from_each_of_several(
    pieces: list[range], removed: list[range]
) -> None:
    left, gone = Counter(members(pieces)), {*members(removed)}
    assert Counter(members(subtract(pieces, *removed))) == Counter(
        {position: count for position, count in left.items() if position not in gone}
    )


@laws
@given(many, many)
def test_what_several_ranges_have_in_common_with_others_is_there_once_for_each(
    pieces: list[range], others: list[range]
) -> None:
    in_others = Counter(members(others))
    met = Counter({p: count * in_others[p] for p, count in Counter(members(pieces)).items()})
    assert Counter(members(common(pieces, *others))) == +met


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
    for taken in cuts:
        pieces = tuple(p for piece in pieces for p in (intersection(piece, taken), *difference(piece, taken)))
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


@laws
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4)), max_size=12))
def test_coalescing_joins_each_to_the_nearest_that_it_continues(shapes: list[tuple[int, int, int]]) -> None:
    pieces: tuple[range, ...] = ()
    for start, step, length in shapes:
        rest: tuple[range, ...] = (range(start, start + step * length, step),)
        for taken in pieces:
            rest = subtract(rest, taken)
        pieces += rest
    joined: tuple[range, ...] = ()
    for piece in sorted(pieces, key=lambda r: r.start):
        joined = joining(joined, piece)
    assert coalesce(pieces) == joined


def test_single_positions_join_if_they_are_neighbors_or_in_one_stripe() -> None:
    assert coalesce((range(4, 5, 3), range(5, 6, 7))) == (range(4, 6),)
    assert coalesce((range(4, 5), range(8, 9))) == (range(4, 5), range(8, 9))
    assert coalesce((range(4, 8, 4), range(8, 12, 4))) == (range(4, 12, 4),)


@st.composite
def disjoint(draw: st.DrawFn) -> tuple[range, ...]:
    """Return disjoint ranges in any order, as the positions that a request misses."""
    pieces: tuple[range, ...] = (range(draw(st.integers(0, 60))),)
    for removed in draw(st.lists(ranges, max_size=3)):
        pieces = subtract(pieces, removed)
    return tuple(draw(st.permutations(pieces)))


@laws
@given(disjoint(), ranges)
def test_a_range_is_within_others_if_each_member_is_in_one(
    pieces: tuple[range, ...], positions: range
) -> None:
    assert is_within(positions, pieces) == (set(positions) <= set(members(pieces)))


@laws
@given(disjoint(), many)
def test_a_partition_of_several_ranges_has_every_member_once(
    whole: tuple[range, ...], pieces: list[range]
) -> None:
    assert is_partition(pieces, *whole) == (members(pieces) == members(whole))
    halves = [half for piece in whole for half in (piece[::2], piece[1::2])]
    assert is_partition(halves, *whole)


@laws
@given(disjoint(), st.integers(0, 70))
def test_the_first_of_some_ranges_are_their_lowest_members(pieces: tuple[range, ...], count: int) -> None:
    pieces = pieces or (range(0),)
    found = first_of(pieces, count)
    assert members(found) == members(pieces)[:count]
    assert all(found)
    assert num_below(pieces, count) == sum(position < count for position in members(pieces))


@laws
@given(disjoint(), st.integers(1, 6))
def test_dealt_stripes_are_even_and_have_every_member_once(pieces: tuple[range, ...], count: int) -> None:
    stripes = dealt(pieces, count)
    assert members([p for each in stripes for p in each]) == members(pieces)
    assert all(p for each in stripes for p in each)
    sizes = [sum(map(len, each)) for each in stripes]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_ring_position_i_of_p_has_every_pth_member_of_one_range() -> None:
    assert dealt((range(3, 30, 2),), 3) == tuple((stripe(range(3, 30, 2), i, 3),) for i in range(3))


@laws
@given(disjoint(), st.lists(st.integers(0, 60), max_size=4))
def test_cut_pieces_follow_each_other(pieces: tuple[range, ...], inner: list[int]) -> None:
    in_a_row = [position for piece in pieces for position in piece]
    boundaries = [0, *sorted(min(b, len(in_a_row)) for b in inner), len(in_a_row)]
    found = cut(pieces, boundaries)
    assert [[p for piece in each for p in piece] for each in found] == [
        in_a_row[a:b] for a, b in pairwise(boundaries)
    ]


@laws
@given(ranges, ranges)
def test_pairs_are_counted_in_which_the_key_is_not_after_the_query(keys: range, queries: range) -> None:
    assert num_ordered_pairs(keys, queries) == sum(key <= query for key in keys for query in queries)
