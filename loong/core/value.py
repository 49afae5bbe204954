"""Value types that are as fast to construct as tuples, and properties that are computed once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, dataclass_transform

S = TypeVar("S")
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """Make a dataclass whose fields never change: to type checkers, it is frozen.

    It is for the few types of which every event makes hundreds. A dataclass that is frozen at run time sets
    each field by a call, which takes several times as long.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


class computed_once(Generic[S, T]):  # noqa: N801 - it is used as a decorator
    """A property of a value, which is computed when it is first read.

    Unlike `cached_property` it takes no lock, which would cost more than most of these computations.
    """

    def __init__(self, compute: Callable[[S], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, kind: type[S], name: str) -> None:
        self._name = name

    def __get__(self, value: S, kind: type[S]) -> T:
        found = vars(value)[self._name] = self._compute(value)
        return found
