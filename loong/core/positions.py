"""Arithmetic on sets of token positions, each a `range` (an arithmetic progression).

A stripe of a prompt is a `range` with a step, so a placement of a million tokens is a few objects. Every
function here uses number theory, never enumeration. All ranges here have a positive step and non-negative
members.
"""

from collections.abc import Iterable
from itertools import chain, pairwise
from math import gcd

EMPTY = range(0)


def stripe(positions: range, index: int, count: int) -> range:
    """Return every `count`-th position, beginning with number `index`: the part of ring position `index`."""
    return positions[index::count]


def intersection(a: range, b: range) -> range:
    """Return the common members of `a` and `b`, by the Chinese remainder theorem."""
    if a.step == b.step == 1:
        return range(max(a.start, b.start), min(a.stop, b.stop))
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


def difference(a: range, b: range) -> tuple[range, ...]:
    """Return the members of `a` that are not in `b`, as disjoint ranges."""
    common = intersection(a, b)
    if not common:
        return (a,) if a else ()
    ratio = common.step // a.step if len(common) > 1 else 1
    between: Iterable[range]
    if ratio <= len(common):  # few ranges that step over the common members
        between = (range(common[0] + k * a.step, common[-1], common.step) for k in range(1, ratio))
    else:  # few gaps from each common member to the next
        between = (range(c + a.step, c + common.step, a.step) for c in common[:-1])
    pieces = (range(a.start, common[0], a.step), *between, range(common[-1] + a.step, a.stop, a.step))
    return tuple(piece for piece in pieces if piece)


def subtract(ranges: Iterable[range], removed: range) -> tuple[range, ...]:
    """Return the members of any of `ranges` that are not in `removed`."""
    return tuple(piece for positions in ranges for piece in difference(positions, removed))


def is_subset(a: range, b: range) -> bool:
    """Return whether every member of `a` is in `b`."""
    if a and b.step == 1:
        return b.start <= a[0] and a[-1] < b.stop
    return len(intersection(a, b)) == len(a)


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


def is_partition(ranges: Iterable[range], whole: range) -> bool:
    """Return whether every member of `whole` is in exactly one of `ranges`, and nothing else is in any."""
    pieces = [r for r in ranges if r]
    if len(pieces) == 1:
        return pieces[0] == whole
    return (
        sum(map(len, pieces)) == len(whole)
        and all(is_subset(piece, whole) for piece in pieces)
        and first_overlap(pieces) is None
    )


def coalesce(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the same positions with ranges joined that continue each other, sorted by first member."""
    joined: tuple[range, ...] = ()
    for current in sorted((r for r in ranges if r), key=lambda r: r[0]):
        joined = joining(joined, current)
    return joined


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
