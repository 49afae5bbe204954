"""Tiles of attention: the parts of a table that a library's kernels, with few shapes, can compute.

The shapes are few, because a library takes long to plan each one: causal squares whose sizes are multiples of
one size, and full rectangles. The rest of a table has any shape.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from loong.kernels.attend_task import AttendTask

_MOST_LEFT = 1 / 4  # of a square's queries, left after it
_BLOCK = 128  # queries of a head that a multiprocessor attends at a time
_PIECES = 2, 4, 8
_LEAST_PIECE = 2048  # keys
_MERGING = 0.01  # of the time, for each piece


class Tile(NamedTuple):
    """Rows of queries and of keys. Every query sees every key, or (causal) query i sees keys 0 to i.

    The results of the first `num_extra` queries are dropped. They belong to another tile, and only fill the
    shape.
    """

    query_row: int
    num_queries: int
    key_row: int
    num_keys: int
    is_causal: bool
    num_extra: int = 0

    @property
    def rows(self) -> slice:
        """The queries whose results are used."""
        return slice(self.query_row + self.num_extra, self.query_row + self.num_queries)


class TileSizes(NamedTuple):
    """The possible tiles. Squares have multiples of `square`, which is one of `many_queries` and of `keys`.

    Rectangles have `least_queries` or more. Their queries are multiples of `many_queries`, or of
    `few_queries` if there are fewer queries, or `wide_keys` keys or more. Their keys are `keys` times a power
    of two, as `most_keys` is. They cover at least `least_pairs` pairs, because the host needs longer for a
    smaller tile than a GPU saves by it.
    """

    square: int
    largest_square: int
    least_queries: int
    few_queries: int
    many_queries: int
    most_queries: int
    keys: int
    wide_keys: int
    most_keys: int
    least_pairs: int

    @classmethod
    def usual(cls) -> "TileSizes":
        """Return the sizes at which a library is faster on an H200, with 8 or 32 KV heads."""
        return cls(
            square=8192,
            largest_square=65536,  # cuDNN is slower beyond: a head's KV does not fit the cache
            least_queries=256,
            few_queries=128,
            many_queries=512,
            most_queries=4096,
            keys=2048,
            wide_keys=16384,
            most_keys=65536,
            least_pairs=1 << 24,
        )

    def shapes(self) -> Iterator[Tile]:
        """Yield a tile of every shape."""
        for size in range(self.square, self.largest_square + 1, self.square):
            yield Tile(0, size, 0, size, is_causal=True)
        few = range(self.few_queries, self.many_queries, self.few_queries)
        for num_queries in (*few, *range(self.many_queries, self.most_queries + 1, self.many_queries)):
            num_keys = self.keys
            while num_keys <= self.most_keys:
                yield Tile(0, num_queries, 0, num_keys, is_causal=False)
                num_keys *= 2


class Cut(NamedTuple):
    """Tiles to compute one after the other, and the rest of the tasks, in which no query occurs twice."""

    tiles: tuple[Tile, ...]
    rest: tuple[AttendTask, ...]

    @property
    def is_merged(self) -> bool:
        """Return whether some query is in several tiles or tasks, or in a rectangle, whose keys may be
        cut.
        """
        if not all(tile.is_causal for tile in self.tiles):
            return True
        rows = [(tile.rows.start, tile.rows.stop) for tile in self.tiles]
        rows += [(task.query_row, task.query_row + task.num_queries) for task in self.rest]
        return any(stop > following for (_, stop), (following, _) in pairwise(sorted(rows)))


def cut_tiles(tasks: Sequence[AttendTask], sizes: TileSizes) -> Cut:
    """Return all tiles that fit into tasks, in which no query occurs twice, and the rest."""
    tiles: list[Tile] = []
    rest: list[AttendTask] = []
    uncut = list(reversed(tasks))
    while uncut:
        task = uncut.pop()
        if num_keys := _num_keys_of_rectangle(task, sizes):
            keys = range(task.key_row, task.key_row + num_keys)
            tiles += _rectangles(task.query_row, task.num_queries, keys, sizes)
            uncut.append(_after_keys(task, num_keys))
        elif square := _largest_square(task, sizes.square):
            tiles += _squares(square, sizes)
            left = _after_queries(task, square.query_row - task.query_row + square.num_queries)
            (uncut if left.num_queries > sizes.most_queries else rest).append(left)
        elif task.num_queries and task.num_keys:
            rest.append(task)
    return Cut(tuple(tiles), tuple(task for task in rest if task.num_queries))


def _num_keys_of_rectangle(task: AttendTask, sizes: TileSizes) -> int:
    """Return how many of the first keys, which every query sees, make rectangles with all queries."""
    if task.num_queries < sizes.least_queries:
        return 0
    num_keys = sizes.keys
    while num_keys * task.num_queries < sizes.least_pairs:
        num_keys *= 2
    num_seen = min(_num_seen_by_first(task), task.num_keys)
    return num_seen // num_keys * num_keys


def _num_seen_by_first(task: AttendTask) -> int:
    return max(0, (task.first_query - task.first_key) // task.key_step + 1)


def _largest_square(task: AttendTask, step: int) -> Tile | None:
    """Return queries and keys of a causal square, or None if too much of the task would be left.

    The first query sees one key, or none if its stripe is behind. Attending a whole task is faster than a
    square with a large rest.
    """
    num_blind = 1 - _num_seen_by_first(task)
    if task.query_step != task.key_step or num_blind not in (0, 1):
        return None
    if num_blind and task.first_query + task.query_step < task.first_key:
        return None  # the second query sees none, too
    size = min(task.num_queries - num_blind, task.num_keys) // step * step
    if task.num_queries - num_blind - size > size * _MOST_LEFT:
        return None
    return Tile(task.query_row + num_blind, size, task.key_row, size, is_causal=True) if size > 0 else None


def _squares(square: Tile, sizes: TileSizes) -> Iterator[Tile]:
    """Yield a square as squares along its diagonal, and the rectangles before each."""
    for start in range(0, square.num_queries, sizes.largest_square):
        size = min(sizes.largest_square, square.num_queries - start)
        row, keys = square.query_row + start, range(square.key_row, square.key_row + start)
        yield Tile(row, size, keys.stop, size, is_causal=True)
        yield from _rectangles(row, size, keys, sizes)


def _rectangles(query_row: int, num_queries: int, keys: range, sizes: TileSizes) -> Iterator[Tile]:
    """Yield a rectangle of enough queries, whose keys are a multiple of the least. Equal keys are adjacent.

    The last part repeats some queries if the parts have more queries than the rectangle.
    """
    width = sizes.most_keys
    while keys:
        while width > len(keys):
            width //= 2
        parts = _parts(num_queries, width, sizes)
        for start, size in zip(accumulate(parts, initial=0), parts, strict=False):
            first = min(start, num_queries - size)
            yield Tile(query_row + first, size, keys.start, width, is_causal=False, num_extra=start - first)
        keys = keys[width:]


def _parts(num_queries: int, num_keys: int, sizes: TileSizes) -> list[int]:
    """Return the number of queries of each of a rectangle's tiles, as few in total as possible.

    No tile has more queries than the rectangle.
    """
    is_fine = num_keys >= sizes.wide_keys or num_queries < sizes.many_queries
    many, few = sizes.many_queries, sizes.few_queries if is_fine else sizes.many_queries
    needed = -(-num_queries // few) * few
    left = needed % many
    parts = _even_parts(needed - left, many, -(-(needed - left) // sizes.most_queries))
    parts += [left] if left else []
    if parts == [needed] and needed > num_queries:
        return _even_parts(needed, few if needed <= many else many, 2)
    return parts


def _even_parts(total: int, unit: int, num_parts: int) -> list[int]:
    """Return `num_parts` parts of `total`, all multiples of `unit`; none for a total of 0."""
    if not total:
        return []
    least, num_larger = divmod(total // unit, num_parts)
    return [(least + (part < num_larger)) * unit for part in range(num_parts)]


def _after_queries(task: AttendTask, num_done: int) -> AttendTask:
    """Return the rest of a task after its first queries."""
    return task._replace(
        query_row=task.query_row + num_done,
        num_queries=task.num_queries - num_done,
        first_query=task.first_query + num_done * task.query_step,
    )


def _after_keys(task: AttendTask, num_done: int) -> AttendTask:
    """Return the rest of a task after its first keys."""
    return task._replace(
        key_row=task.key_row + num_done,
        num_keys=task.num_keys - num_done,
        first_key=task.first_key + num_done * task.key_step,
    )


def best_num_pieces(num_queries: int, num_heads: int, num_keys: int, num_processors: int) -> int:
    """Return into how many pieces to cut keys, so that the last blocks of queries fill a GPU.

    A multiprocessor takes equally long for a block over all keys, even if the others are idle.
    """
    num_blocks = -(-num_queries // _BLOCK) * num_heads

    def time(num_pieces: int) -> float:
        num_rounds = -(-num_blocks * num_pieces // num_processors)
        return num_rounds / num_pieces * (1 + _MERGING * num_pieces)

    possible = (n for n in _PIECES if num_keys % n == 0 and num_keys >= n * _LEAST_PIECE)
    return min((1, *possible), key=time)
