"""Python functions as machine code."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, compiled by numba at its first call, never at import.

    The code is kept beside the source file, else in the user's cache folder, or where numba is told to, and
    loaded from there by later processes. Where none can be written, each process compiles anew. While it
    runs, other threads may.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder that it can write
        return njit(nogil=True)(function)
