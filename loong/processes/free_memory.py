"""Memory that a process has freed, and its allocator keeps."""

import ctypes


def give_back_free_memory() -> None:
    """Give it back to the system, where the C library can (glibc). It takes milliseconds, without the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
