"""Value types that are as fast to construct as tuples."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """Make a dataclass whose fields never change: to type checkers, it is frozen.

    It is for the few types of which every event makes hundreds. A dataclass that is frozen at run time sets
    each field by a call, which takes several times as long.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
