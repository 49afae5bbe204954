"""Tiles of attention: what a library's kernels, which know only some shapes, can compute of a table.

Their shapes are few, because each takes the library long to plan, once: causal squares whose sizes are
multiples of one size, and full rectangles. What is left has shapes of all kinds.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from loong.kernels.attend_task import AttendTask

_MOST_LEFT = 1 / 4  # of a square's queries, behind it
_BLOCK = 128  # queries of a head that a multiprocessor attends at a time
_PIECES = 2, 4, 8
_LEAST_PIECE = 2048  # keys
_MERGING = 0.01  # of the time, for each piece


class Tile(NamedTuple):
    """Some rows of queries and of keys: every query sees every key, or (causal) query i sees keys 0 to i.

    What comes of the first `num_extra` queries is dropped: they are in another tile, and here for the shape.
    """

    query_row: int
    num_queries: int
    key_row: int
    num_keys: int
    is_causal: bool
    num_extra: int = 0

    @property
    def rows(self) -> slice:
        """The queries of which something comes."""
        return slice(self.query_row + self.num_extra, self.query_row + self.num_queries)


class TileSizes(NamedTuple):
    """Which tiles there are: squares of multiples of `square`, which is one of `many_queries` and of `keys`.

    Rectangles are cut from `least_queries` on. They have multiples of `many_queries`, or fewer, which are
    multiples of `few_queries`, where there are `wide_keys` or more. They have `keys` times a power of two, as
    `most_keys` is one, so many that all queries meet them in `least_pairs`: of less a host takes longer for
    another tile than a GPU saves by it.
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
        """Those of which a library is quicker on an H200, with 8 KV heads or 32."""
        return cls(
            square=8192,
            largest_square=65536,  # cuDNN is 8 % slower at twice that: a head's KV is then beyond the cache
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
        """A tile of every shape."""
        for size in range(self.square, self.largest_square + 1, self.square):
            yield Tile(0, size, 0, size, is_causal=True)
        few = range(self.few_queries, self.many_queries, self.few_queries)
        for num_queries in (*few, *range(self.many_queries, self.most_queries + 1, self.many_queries)):
            num_keys = self.keys
            while num_keys <= self.most_keys:
                yield Tile(0, num_queries, 0, num_keys, is_causal=False)
                num_keys *= 2


class Cut(NamedTuple):
    """Tiles, which are done one after the other, and the rest, in which no query comes twice."""

    tiles: tuple[Tile, ...]
    rest: tuple[AttendTask, ...]

    @property
    def is_merged(self) -> bool:
        """Whether some query is in several of all these, or in a rectangle, whose keys may come in pieces."""
        if not all(tile.is_causal for tile in self.tiles):
            return True
        rows = [(tile.rows.start, tile.rows.stop) for tile in self.tiles]
        rows += [(task.query_row, task.query_row + task.num_queries) for task in self.rest]
        return any(stop > following for (_, stop), (following, _) in pairwise(sorted(rows)))


def cut_tiles(tasks: Sequence[AttendTask], sizes: TileSizes) -> Cut:
    """Cut from tasks, in which no query comes twice, all tiles that fit."""
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
    """How many of the first keys, which every query sees, make rectangles with all of the queries."""
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
    """Queries and keys of a stripe each: the first query sees one key, or none if its stripe is behind.

    None if much would be left: to attend all of it at once is quicker than what a square leaves.
    """
    num_blind = 1 - _num_seen_by_first(task)
    if task.query_step != task.key_step or num_blind not in (0, 1):
        return None
    if num_blind and task.first_query + task.query_step < task.first_key:
        return None  # the second sees none either
    size = min(task.num_queries - num_blind, task.num_keys) // step * step
    if task.num_queries - num_blind - size > size * _MOST_LEFT:
        return None
    return Tile(task.query_row + num_blind, size, task.key_row, size, is_causal=True) if size > 0 else None


def _squares(square: Tile, sizes: TileSizes) -> Iterator[Tile]:
    """A square in squares along its diagonal, and what is before each."""
    for start in range(0, square.num_queries, sizes.largest_square):
        size = min(sizes.largest_square, square.num_queries - start)
        row, keys = square.query_row + start, range(square.key_row, square.key_row + start)
        yield Tile(row, size, keys.stop, size, is_causal=True)
        yield from _rectangles(row, size, keys, sizes)


def _rectangles(query_row: int, num_queries: int, keys: range, sizes: TileSizes) -> Iterator[Tile]:
    """All of a rectangle of enough queries, and keys a multiple of the least; same keys follow each other.

    The last of its parts repeats some queries where the parts have more than there are.
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
    """How many queries each of a rectangle's tiles has, none more than there are: as few in all as can be."""
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
    """So many parts of `total`, all multiples of `unit`; none of nothing."""
    if not total:
        return []
    least, num_larger = divmod(total // unit, num_parts)
    return [(least + (part < num_larger)) * unit for part in range(num_parts)]


def _after_queries(task: AttendTask, num_done: int) -> AttendTask:
    """What is left of a task once its first queries are done."""
    return task._replace(
        query_row=task.query_row + num_done,
        num_queries=task.num_queries - num_done,
        first_query=task.first_query + num_done * task.query_step,
    )


def _after_keys(task: AttendTask, num_done: int) -> AttendTask:
    """What is left of a task once its first keys are done."""
    return task._replace(
        key_row=task.key_row + num_done,
        num_keys=task.num_keys - num_done,
        first_key=task.first_key + num_done * task.key_step,
    )


def best_num_pieces(num_queries: int, num_heads: int, num_keys: int, num_processors: int) -> int:
    """Into how many pieces keys are to be cut, so that the last blocks of queries occupy all of a GPU.

    A multiprocessor takes as long for a block, over all keys, whether the others have one or not.
    """
    num_blocks = -(-num_queries // _BLOCK) * num_heads

    def time(num_pieces: int) -> float:
        num_rounds = -(-num_blocks * num_pieces // num_processors)
        return num_rounds / num_pieces * (1 + _MERGING * num_pieces)

    possible = (n for n in _PIECES if num_keys % n == 0 and num_keys >= n * _LEAST_PIECE)
    return min((1, *possible), key=time)
