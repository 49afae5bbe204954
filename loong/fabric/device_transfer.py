"""Transfers for which the caller's device waits, and not the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A Pending of transfers that were begun together.

    Each of `waits` lets what the caller asks its device for next come behind one of them. The tensors are
    held, so that their memory becomes nothing else meanwhile.
    """

    waits: Sequence[Callable[[], object]]
    tensors: Sequence[Tensor]
    check: Callable[[], None]

    def wait(self) -> None:
        """See Pending."""
        for wait in self.waits:
            wait()
        self.check()
