"""The multiprocessors of a GPU that cuBLAS uses."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch


@contextmanager
def products_on(num_processors: int) -> Iterator[None]:
    """Return a context in which this thread's matrix products use this number of multiprocessors; 0: all.

    On Hopper a product starts one program on each multiprocessor, with a fixed part of the work. If another
    stream has one of these, the last program starts when the others have ended. Raises `RuntimeError` if
    cuBLAS refuses the number.
    """
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]  # torch's own
    _set_processors(handle, num_processors)
    try:
        yield
    finally:
        _set_processors(handle, 0)


def _set_processors(handle: ctypes.c_void_p, number: int) -> None:
    if status := _cublas().cublasSetSmCountTarget(handle, ctypes.c_int(number)):
        raise RuntimeError(f"cuBLAS refuses {number} multiprocessors: status {status}")


@cache
def _cublas() -> ctypes.CDLL:
    """Return the library that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in lines if "/libcublas.so" in line))
