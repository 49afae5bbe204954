"""Observed lengths of outputs, counted by length and by the maximum that requests declared."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

_DETAIL = 8  # lengths of one power of two fall into this many parts
LEAST_OBSERVED = 16  # outputs of similar maximum, with fewer of which nothing is predicted

LengthCounts: TypeAlias = tuple[int, ...]
"""The number of outputs in each bin of lengths, the shortest first."""


def maximum_class(max_tokens: int) -> int:
    """Return the class of a declared maximum: its powers of two, rounded down."""
    return max_tokens.bit_length()


def bin_of(length: int) -> int:
    """Return the bin of a length: the same for lengths that differ by less than an eighth."""
    shift = max(0, length.bit_length() - _DETAIL.bit_length())
    return _DETAIL * shift + (length >> shift)


def longest_of(number: int) -> int:
    """Return the greatest length of a bin."""
    shift = max(0, number // _DETAIL - 1)
    return ((number - _DETAIL * shift + 1) << shift) - 1


@lru_cache(maxsize=64)
def expected_lengths(counts: LengthCounts, share: float) -> Sequence[int]:
    """Return, by the bin of an output's length so far, the length that `share` of such outputs do not exceed.

    An output that is longer than all observed ones is expected to become twice as long as it is. Without
    enough observations there is no expectation, and the result is empty.
    """
    total = sum(counts)
    return tuple(_expected(counts, share)) if total >= LEAST_OBSERVED else ()


def _expected(counts: LengthCounts, share: float) -> Iterator[int]:
    ended = (0, *accumulate(counts))
    for number in range(len(counts)):
        num_longer = ended[-1] - ended[number]
        wanted = ended[number] + share * num_longer
        last = next(n for n in range(number, len(counts)) if ended[n + 1] >= wanted)
        yield longest_of(last)
