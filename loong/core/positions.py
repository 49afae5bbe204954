"""Arithmetic on sets of token positions, each a `range` (an arithmetic progression).

A stripe of a prompt is a `range` with a step, so a placement of a million tokens is a few objects. Every
function here uses number theory, never enumeration. All ranges here have a positive step and non-negative
members.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise, product
from math import gcd
from operator import itemgetter

EMPTY = range(0)


def stripe(positions: range, index: int, count: int) -> range:
    """Return every `count`-th position, beginning with number `index`: the part of ring position `index`."""
    return positions[index::count]


def intersection(a: range, b: range) -> range:
    """Return the common members of `a` and `b`, by the Chinese remainder theorem."""
    if a.step == b.step:
        if (b.start - a.start) % a.step:
            return EMPTY
        return range(max(a.start, b.start), min(a.stop, b.stop), a.step)
    if a.step == 1:
        a, b = b, a
    if b.step == 1:
        first = a.start if a.start >= b.start else b.start + (a.start - b.start) % a.step
        return range(first, min(a.stop, b.stop), a.step)
    if not a or not b:
        return EMPTY
    divisor = gcd(a.step, b.step)
    distance = b.start - a.start
    if distance % divisor:
        return EMPTY
    modulus = b.step // divisor
    num_steps = distance // divisor * pow(a.step // divisor, -1, modulus) % modulus
    period = a.step * modulus
    first = a.start + num_steps * a.step
    lowest = max(a.start, b.start)
    if first < lowest:
        first += -(-(lowest - first) // period) * period
    return range(first, min(a.stop, b.stop), period)


def _difference_of_one_step(a: range, b: range) -> tuple[range, ...]:
    """Return the members of `a` that are not in `b`, which has the same step and is not empty."""
    if a.start >= b.stop or b.start >= a.stop or (a.start - b.start) % a.step:
        return (a,) if a else ()
    before = range(a.start, b.start, a.step)
    after = range(max(a.start, b[-1] + a.step), a.stop, a.step)
    if before:
        return (before, after) if after else (before,)
    return (after,) if after else ()


def difference(a: range, b: range) -> tuple[range, ...]:
    """Return the members of `a` that are not in `b`, as disjoint ranges."""
    if a.step == b.step and b:
        return _difference_of_one_step(a, b)
    common = intersection(a, b) if a.start < b.stop and b.start < a.stop else EMPTY
    if not common:
        return (a,) if a else ()
    if len(common) == len(a):
        return ()
    if common.step == a.step:
        return _difference_of_one_step(a, common)
    ratio = common.step // a.step if len(common) > 1 else 1
    between: Iterable[range]
    if ratio <= len(common):  # few ranges that step over the common members
        between = (range(common[0] + k * a.step, common[-1], common.step) for k in range(1, ratio))
    else:  # few gaps from each common member to the next
        between = (range(c + a.step, c + common.step, a.step) for c in common[:-1])
    pieces = (range(a.start, common[0], a.step), *between, range(common[-1] + a.step, a.stop, a.step))
    return tuple(piece for piece in pieces if piece)


def subtract(ranges: Iterable[range], *removed: range) -> tuple[range, ...]:
    """Return the members of any of `ranges` that are in none of `removed`."""
    rest = tuple(ranges)
    for gone in removed:
        start, stop, step = gone.start, gone.stop, gone.step
        for p in rest:  # most ranges are apart, or other stripes; a call would cost more
            if p.start < stop and start < p.stop and (p.step != step or not (p.start - start) % step):
                rest = tuple([piece for positions in rest for piece in difference(positions, gone)])
                break
    return rest


def common(ranges: Iterable[range], *others: range) -> tuple[range, ...]:
    """Return the members of any of `ranges` that are in one of `others`, which are disjoint."""
    return tuple(
        [
            met
            for a, b in product(ranges, others)
            if a.start < b.stop and b.start < a.stop and (met := intersection(a, b))  # most are apart
        ]
    )


def first_overlap(ranges: Iterable[range]) -> range | None:
    """Return positions that two of `ranges` share, or None if all are disjoint.

    Ranges of one step meet only if they have the same remainder, and then in the order of their first
    members. So the stripes of a chunk need no comparison of all pairs.
    """
    by_step: dict[int, list[range]] = {}
    for positions in ranges:
        if positions:
            by_step.setdefault(positions.step, []).append(positions)
    for step, alike in by_step.items():
        alike.sort(key=lambda r: (r.start % step, r.start))
        for a, b in pairwise(alike):
            if common := intersection(a, b):
                return common
    return _first_overlap_of_different_steps(by_step.values()) if len(by_step) > 1 else None


def _first_overlap_of_different_steps(groups: Iterable[list[range]]) -> range | None:
    """Sweep by first member, so that ranges of different chunks are never compared."""
    active: list[range] = []
    for current in sorted(chain.from_iterable(groups), key=lambda r: r.start):
        active = [other for other in active if other[-1] >= current.start]
        for other in active:
            if other.step != current.step and (common := intersection(current, other)):
                return common
        active.append(current)
    return None


def is_within(positions: range, ranges: Iterable[range]) -> bool:
    """Return whether every member of `positions` is in one of `ranges`, which are disjoint."""
    return sum(len(intersection(positions, r)) for r in ranges) == len(positions)


def is_partition(ranges: Iterable[range], *whole: range) -> bool:
    """Return whether every member of `whole`, which is disjoint, is in exactly one of `ranges`.

    Nothing else may be in any of them.
    """
    pieces = [r for r in ranges if r]
    if len(pieces) == len(whole) == 1:
        return pieces[0] == whole[0]
    return (
        sum(map(len, pieces)) == sum(map(len, whole))
        and all(is_within(piece, whole) for piece in pieces)
        and first_overlap(pieces) is None
    )


def coalesce(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the positions of disjoint ranges with those joined that continue each other.

    They are sorted by first member. Each is joined as by `joining`, but without looking at all others.
    """
    joined: list[range] = []
    by_last: dict[int, int] = {}  # places in `joined`
    by_next: dict[int, int] = {}  # of the nearest range that has this position next
    ranges = [positions for positions in ranges if positions]
    if len(ranges) < 2:
        return tuple(ranges)
    for later in sorted(ranges, key=itemgetter(0)):
        first = later[0]
        candidates = (by_next.get(first), by_last.get(first - 1), by_last.get(first - later.step))
        places = [p for p in candidates if p is not None and _continues(joined[p], later)]
        place = max(places, key=lambda p: joined[p][-1], default=len(joined))
        if places:
            earlier = joined[place]
            by_last.pop(earlier[-1], None)
            joined[place] = range(earlier[0], later[-1] + 1, first - earlier[-1])
        else:
            joined.append(later)
        run = joined[place]
        by_last[run[-1]] = place
        if len(run) > 1:
            other = by_next.get(run[-1] + run.step)
            if other is None or joined[other][-1] < run[-1]:
                by_next[run[-1] + run.step] = place
    return tuple(joined)


def joining(ranges: tuple[range, ...], later: range) -> tuple[range, ...]:
    """Return these ranges and a later one, joined to the nearest one that it continues, if any.

    The nearest is right: a run of decode tokens must not be broken by a stripe that ends before it.
    """
    nearest, last, first = None, -1, later[0]
    for place, earlier in enumerate(ranges):
        if last < earlier[-1] < first and _continues(earlier, later):
            nearest, last = place, earlier[-1]
    if nearest is None:
        return (*ranges, later)
    longer = range(ranges[nearest][0], later[-1] + 1, first - last)
    return (*ranges[:nearest], longer, *ranges[nearest + 1 :])


def _continues(earlier: range, later: range) -> bool:
    """Return whether `later` continues `earlier` with the step of both.

    A single position takes the step of a longer range. With another single position, both have the step of
    the stripe that they come from.
    """
    gap = later[0] - earlier[-1]
    if len(earlier) == 1 and len(later) == 1:
        return gap == 1 or gap == earlier.step == later.step
    return (len(earlier) == 1 or earlier.step == gap) and (len(later) == 1 or later.step == gap)


def num_below(ranges: Iterable[range], stop: int) -> int:
    """Return the number of members below `stop`."""
    return sum(len(range(r.start, min(r.stop, stop), r.step)) for r in ranges)


def at_or_after(ranges: Iterable[range], first: int) -> tuple[range, ...]:
    """Return the members of `ranges` that are `first` or more."""
    return tuple([positions[_num_before(positions, first) :] for positions in ranges])


def before(ranges: Iterable[range], stop: int) -> tuple[range, ...]:
    """Return the members of `ranges` that are below `stop`."""
    return tuple([positions[: _num_before(positions, stop)] for positions in ranges])


def _num_before(positions: range, first: int) -> int:
    return max(0, -((positions.start - first) // positions.step))


def first_of(ranges: Sequence[range], count: int) -> tuple[range, ...]:
    """Return the `count` lowest members of disjoint `ranges`, or all if there are fewer."""
    if len(ranges) == 1:
        return tuple(filter(None, (ranges[0][:count],)))
    low, high = 0, max((r[-1] + 1 for r in ranges if r), default=0)
    while low < high:  # for the lowest `high` below which there are that many
        middle = (low + high) // 2
        if num_below(ranges, middle) < count:
            low = middle + 1
        else:
            high = middle
    pieces = (range(r.start, min(r.stop, high), r.step) for r in ranges)
    return tuple(piece for piece in pieces if piece)


def dealt(ranges: Sequence[range], count: int) -> tuple[tuple[range, ...], ...]:
    """Return the stripes of `ranges` for each of `count` ring positions, which differ by one member at most.

    Each range goes on at the ring position after the one where the range before it ends.
    """
    firsts = tuple(accumulate(map(len, ranges), initial=0))
    stripes = (
        tuple(stripe(r, (index - first) % count, count) for r, first in zip(ranges, firsts, strict=False))
        for index in range(count)
    )
    return tuple(tuple(filter(None, pieces)) for pieces in stripes)


def cut(ranges: Sequence[range], boundaries: Iterable[int]) -> tuple[tuple[range, ...], ...]:
    """Return the pieces between ascending `boundaries`, counted in members of one range after the other."""
    firsts = tuple(accumulate(map(len, ranges), initial=0))
    return tuple(
        tuple(filter(None, (r[max(0, a - f) : max(0, b - f)] for r, f in zip(ranges, firsts, strict=False))))
        for a, b in pairwise(boundaries)
    )


def num_ordered_pairs(keys: range, queries: range) -> int:
    """Return the number of pairs of a key and a query at or after it."""
    last = keys[-1] if keys else 0
    behind = queries[num_below((queries,), last) :]  # these are after every key
    among = queries[num_below((queries,), keys.start) : len(queries) - len(behind)]
    met = _sum_of_floors(len(among), keys.step, queries.step, among.start - keys.start) + len(among)
    return met + len(behind) * len(keys)


def _sum_of_floors(count: int, divisor: int, slope: int, offset: int) -> int:
    """Return the sum of (slope * i + offset) // divisor for i from 0 to `count` - 1, as Euclid would."""
    total = 0
    while count:
        total += (count - 1) * count // 2 * (slope // divisor) + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        highest = slope * count + offset
        count, offset = highest // divisor, highest % divisor
        slope, divisor = divisor, slope
    return total
