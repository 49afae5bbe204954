"""Garbage collection apart from what other tests have left."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let collections look only at objects that are made inside the context."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
