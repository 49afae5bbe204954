"""Sets of combinations that cover what a full product would: faults show where two values meet."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product


def pairwise(*parameters: Iterable[object]) -> list[tuple[object, ...]]:
    """Return combinations of parameters' values. Any two values of two parameters are in one of them."""
    values = [tuple(parameter) for parameter in parameters]
    left = list(product(*(range(len(of_one)) for of_one in values)))
    needed = {pair for indices in left for pair in _pairs(indices)}
    chosen = []
    while needed:
        best = max(left, key=lambda indices: len(needed.intersection(_pairs(indices))))
        needed.difference_update(_pairs(best))
        chosen.append(best)
    return [tuple(of_one[i] for of_one, i in zip(values, indices, strict=True)) for indices in sorted(chosen)]


def _pairs(indices: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return list(combinations(enumerate(indices), 2))
