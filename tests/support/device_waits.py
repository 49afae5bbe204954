"""A wait on a stream of a GPU, as a step has for another process, until a test ends it."""

import torch

from loong.kernels.exchange.signals import Deadline, wait


class DeviceWait:
    """A wait of at most `limit` seconds. Its kernel is loaded at once."""

    def __init__(self, limit: float) -> None:
        self._flag = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._stop = torch.full((1,), -1, dtype=torch.int64, device="cuda")
        word = torch.full((2,), -1, dtype=torch.int64).pin_memory()
        self._deadline = Deadline(word, self._stop, round(limit * 1e9))
        self._wait_for(0)  # which is there

    def launch(self) -> None:
        """Let later work on the calling thread's stream wait for `end`."""
        self._wait_for(1)

    def end(self) -> None:
        """End the wait, by the calling thread's stream."""
        self._flag.fill_(1)

    @property
    def has_timed_out(self) -> bool:
        """Return whether it was not ended in time. The device must be done."""
        return self._stop.item() != -1

    def _wait_for(self, epoch: int) -> None:
        wait(self._flag.view(torch.uint8), 0, epoch, 0, self._deadline)
