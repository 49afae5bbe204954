from collections.abc import Sequence
from itertools import groupby

import pytest
from attend_tasks import causal_tasks, full_tasks, pairs_of_tasks
from hypothesis import given
from hypothesis import strategies as st

from loong.kernels.attend_task import AttendTask
from loong.model.tiles import Cut, Tile, TileSizes, best_num_pieces, cut_tiles

SIZES = TileSizes(
    square=4,
    largest_square=8,
    least_queries=3,
    few_queries=2,
    many_queries=4,
    most_queries=8,
    keys=2,
    wide_keys=16,
    most_keys=16,
    least_pairs=24,
)


def pairs_of_tiles(tiles: tuple[Tile, ...]) -> list[tuple[int, int]]:
    """Return the pairs of the tiles."""
    return sorted(
        (tile.query_row + i, tile.key_row + j)
        for tile in tiles
        for i in range(tile.num_extra, tile.num_queries)
        for j in range(i + 1 if tile.is_causal else tile.num_keys)
    )


def queries_of(parts: Sequence[Tile] | Sequence[AttendTask]) -> list[int]:
    """Return the query rows of all parts, as often as something comes of them."""
    extra = {id(part): part.num_extra for part in parts if isinstance(part, Tile)}
    return [part.query_row + i for part in parts for i in range(extra.get(id(part), 0), part.num_queries)]


def cut(tasks: list[AttendTask]) -> tuple[tuple[AttendTask, ...], Cut]:
    """Return tasks with query rows of their own, before and after cutting."""
    apart = tuple(task._replace(query_row=100 * number) for number, task in enumerate(tasks))
    return apart, cut_tiles(apart, SIZES)


@given(st.lists(st.one_of(full_tasks, causal_tasks), max_size=3))
def test_tiles_and_the_rest_are_what_they_were_cut_from(tasks: list[AttendTask]) -> None:
    whole, (tiles, rest) = cut(tasks)
    assert sorted(pairs_of_tiles(tiles) + pairs_of_tasks(rest)) == pairs_of_tasks(whole)


@given(st.lists(st.one_of(full_tasks, causal_tasks), max_size=3))
def test_tiles_have_only_shapes_that_are_planned(tasks: list[AttendTask]) -> None:
    planned = {(shape.num_queries, shape.num_keys, shape.is_causal) for shape in SIZES.shapes()}
    _, (tiles, _) = cut(tasks)
    assert {(tile.num_queries, tile.num_keys, tile.is_causal) for tile in tiles} <= planned


@given(st.lists(st.one_of(full_tasks, causal_tasks), max_size=3))
def test_no_query_is_twice_in_the_rest_and_who_is_merged_is_reported(tasks: list[AttendTask]) -> None:
    _, found = cut(tasks)
    in_rest, in_tiles = queries_of(found.rest), queries_of(found.tiles)
    assert len(set(in_rest)) == len(in_rest)
    is_met_twice = len({*in_rest, *in_tiles}) < len(in_rest) + len(in_tiles)
    has_rectangle = any(not tile.is_causal for tile in found.tiles)  # its keys may come in pieces
    assert found.is_merged == (is_met_twice or has_rectangle)


def test_a_long_prompt_is_squares_on_its_diagonal_and_rectangles_before_them() -> None:
    _, (tiles, rest) = cut([AttendTask.causal(0, range(16), 0, range(16))])
    assert rest == ()
    assert tiles == (
        Tile(0, 8, 0, 8, is_causal=True),
        Tile(8, 8, 8, 8, is_causal=True),
        Tile(8, 8, 0, 8, is_causal=False),
    )


def test_a_chunk_is_many_queries_at_a_time_and_a_few() -> None:
    _, (tiles, rest) = cut([AttendTask.full(0, 13, 0, 24)])
    assert rest == ()
    assert tiles == (
        Tile(0, 8, 0, 16, is_causal=False),
        Tile(8, 4, 0, 16, is_causal=False),
        Tile(11, 2, 0, 16, is_causal=False, num_extra=1),
        Tile(0, 8, 16, 8, is_causal=False),  # so few keys that the host would be longer about more tiles
        Tile(5, 8, 16, 8, is_causal=False, num_extra=3),
    )


def test_a_chunk_of_less_than_a_tile_is_two_tiles_that_share_queries() -> None:
    _, (tiles, rest) = cut([AttendTask.full(0, 3, 0, 8)])
    assert rest == ()
    assert tiles == (
        Tile(0, 2, 0, 8, is_causal=False),
        Tile(1, 2, 0, 8, is_causal=False, num_extra=1),
    )


def test_a_prompt_far_from_the_sizes_of_squares_is_left_whole() -> None:
    _, (tiles, rest) = cut([AttendTask.causal(0, range(7), 0, range(7))])
    assert not tiles
    assert rest == (AttendTask.causal(0, range(7), 0, range(7)),)


@given(st.integers(SIZES.least_queries, 60), st.integers(SIZES.keys, 40))
def test_as_few_queries_are_computed_twice_as_multiples_of_a_size_allow(
    num_queries: int, num_keys: int
) -> None:
    tiles, _ = cut_tiles([AttendTask.full(0, num_queries, 0, num_keys)], SIZES)
    for (_, width), same_keys in groupby(tiles, key=lambda tile: (tile.key_row, tile.num_keys)):
        sizes = [tile.num_queries for tile in same_keys]
        is_fine = width >= SIZES.wide_keys or num_queries < SIZES.many_queries
        size = SIZES.few_queries if is_fine else SIZES.many_queries
        assert sum(sizes) == -(-num_queries // size) * size
        assert max(sizes) <= min(num_queries, SIZES.most_queries)


@pytest.mark.parametrize(
    ("num_queries", "num_heads", "num_keys", "expected"),
    [
        (128, 32, 65536, 4),
        (256, 32, 65536, 2),
        (384, 32, 65536, 4),
        (512, 32, 65536, 1),
        (640, 32, 65536, 4),
        (512, 16, 65536, 2),
        (128, 32, 4096, 2),  # a piece of less is not worth its merge
        (128, 32, 2048, 1),
    ],
)
def test_keys_are_cut_as_was_measured_to_be_quickest_on_132_multiprocessors(
    num_queries: int, num_heads: int, num_keys: int, expected: int
) -> None:
    assert best_num_pieces(num_queries, num_heads, num_keys, 132) == expected


@given(st.integers(1, 5000), st.sampled_from([1, 4, 8, 32]), st.integers(1, 70_000), st.integers(1, 200))
def test_pieces_are_equal(num_queries: int, num_heads: int, num_keys: int, num_processors: int) -> None:
    assert num_keys % best_num_pieces(num_queries, num_heads, num_keys, num_processors) == 0
