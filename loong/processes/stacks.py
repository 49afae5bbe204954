"""Logs the stacks of all threads of a process on SIGUSR1."""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType

logger = logging.getLogger(__name__)

_MAX_FRAMES = 30  # per thread, innermost first
_MAX_CHARACTERS = 2**15


@contextmanager
def stacks_on_request(name: str, then: Callable[[], None] | None = None) -> Iterator[None]:
    """Log the stacks of all threads on each SIGUSR1 while the context lasts, then call `then`, in a thread.

    Threads that hang do not prevent it, unless one of them holds the interpreter's lock. Enter the context
    before other threads start: they inherit the blocked SIGUSR1.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    is_over = threading.Event()

    def wait_for_requests() -> None:
        while signal.sigwait([signal.SIGUSR1]) and not is_over.is_set():
            logger.warning("the threads of %s, process %d:\n%s", name, os.getpid(), stacks())
            try:
                if then is not None:
                    then()
            except Exception:  # the next signal is still answered
                logger.exception("cannot log the stacks")

    thread = threading.Thread(target=wait_for_requests, name="stacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        assert thread.ident is not None  # a started thread has an ident
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        thread.join()


def stacks() -> str:
    """Return the stack of each thread, the main thread first, each with its innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    text = "\n".join(f"{names.get(ident, f'thread {ident}')}\n{_described(frame)}" for ident, frame in frames)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}\n..."


def _described(frame: FrameType) -> str:
    found = islice(traceback.walk_stack(frame), _MAX_FRAMES)
    return "\n".join(f"  {f.f_code.co_filename}:{line} {f.f_code.co_qualname}" for f, line in found)
