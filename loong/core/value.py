"""Values that cost as little to make as tuples."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """A dataclass whose fields never change: to type checkers, frozen.

    For the few kinds of which every event makes hundreds. A dataclass that is frozen at run time too takes 3
    to 7 times as long to make (0.9 us instead of 0.13 for twelve fields), since it sets each field by a call.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
