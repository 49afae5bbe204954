"""Sets of characters, and the regular expressions of how they are written within a JSON string."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # disjoint code points from the first to the last, in order

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
SURROGATES: Ranges = ((0xD800, 0xDFFF),)  # no characters by themselves
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # never as they are within a JSON string
_ESCAPES = {0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t", 0x22: '"', 0x5C: "\\\\"}
_SYNTAX = frozenset("^$.*+?()[]{}|")  # characters with a meaning of their own
ESCAPE = "(?:\\\\"  # how each escape begins, and nothing else


def joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return the union of ranges."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the code points of ranges that are not in others."""
    found = []
    for first, last in ranges:
        for start, stop in others[max(0, bisect(others, (first, first)) - 1) :]:
            if start > last:
                break
            if first < start:
                found.append((first, start - 1))
            first = max(first, stop + 1)
        if first <= last:
            found.append((first, last))
    return tuple(found)


def character(point: int) -> str:
    """Return the regular expression of one character."""
    if is_escaped(point):
        return f"{ESCAPE}{_ESCAPES.get(point, f'u{point:04x}')})"
    return f"\\{chr(point)}" if chr(point) in _SYNTAX else chr(point)


def character_of(ranges: Ranges, written: Iterable[int] = ()) -> str:
    """Return the regular expression of any one character of a set that is not empty.

    Of those that have to be escaped, only `written` ones are left, unless there are no others.
    """
    unescaped = without(ranges, _ESCAPED)
    escaped = sorted({point for point in written if is_escaped(point)})
    if not unescaped and not escaped:
        escaped = [point for first, last in ranges for point in range(first, last + 1)]
    choices = [_class(unescaped)] if unescaped else []
    choices += map(character, escaped)
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def is_escaped(point: int) -> bool:
    """Return whether a character has to be escaped in JSON."""
    return any(first <= point <= last for first, last in _ESCAPED)


def _class(ranges: Ranges) -> str:
    """Return the class of these characters, of which none has to be escaped."""
    if ranges[-1][1] < ALL[-1][1]:
        return f"[{''.join(map(_range, ranges))}]"
    return f"[^{''.join(map(_range, without(ALL, ranges)))}]"


def _range(ends: tuple[int, int]) -> str:
    first, last = map(_class_member, ends)
    return first if first == last else f"{first}-{last}"


def _class_member(point: int) -> str:
    if point < 0x20:
        return f"\\x{point:02x}"
    return f"\\{chr(point)}" if chr(point) in "[]^-\\" else chr(point)
