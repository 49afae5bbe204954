"""Python functions as machine code."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` with numba at its first call, never at import.

    The machine code is cached in the folder of the source file, else in the user's cache folder, or where
    numba is configured to. Later processes load it from there. Without a writable folder, each process
    compiles again. It releases the GIL while it runs.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder that it can write
        return njit(nogil=True)(function)
