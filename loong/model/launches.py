"""Launches of kernels on a GPU: into a captured graph, on a shared device, or ahead of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

import torch

from loong.kernels.launch_queue import LaunchQueue


class Launches:
    """The launches of one device, on the streams that `stream()` returns.

    They `are_captured`, which costs the host nothing, or keep a bound on what is ahead of the device. The
    device `is_shared` for the present batch if it served others at any time since the batch before began.
    """

    def __init__(self, stream: Callable[[], torch.cuda.Stream]) -> None:
        self.are_captured = False
        self.is_shared = False
        self._was_shared = False  # at any time since the present batch began, so also for the next
        self._num_sharers, self._sharing = 0, Lock()
        self._queue = LaunchQueue(stream)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context in which launches are captured, or tried for that."""
        self.are_captured = True
        try:
            yield
        finally:
            self.are_captured = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Return a context in which others are served."""
        with self._sharing:
            self._num_sharers += 1
            self.is_shared = self._was_shared = True
        try:
            yield
        finally:
            with self._sharing:
                self._num_sharers -= 1

    def next_batch(self) -> None:
        """Begin a batch.

        Between two leases there is a gap, in which a chunk often begins. The host launches most of it then.
        """
        with self._sharing:
            self.is_shared, self._was_shared = self._was_shared, self._num_sharers > 0

    def calling(self, meanwhile: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `meanwhile` is called now and then during launches and waits."""
        return self._queue.calling(meanwhile)

    def add(self, num_launches: int) -> None:
        """Wait, if need be, until a step that is launched by the host is not too far ahead of the device."""
        if not self.are_captured:
            self._queue.add(num_launches)
