"""Transfers that the device waits for, while the host continues."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A Pending for transfers that were begun together.

    Each of `waits` makes later device work of the caller wait for one transfer. The tensors are kept alive
    until then.
    """

    waits: Sequence[Callable[[], object]]
    tensors: Sequence[Tensor]
    check: Callable[[], None]

    def wait(self) -> None:
        """See Pending."""
        for wait in self.waits:
            wait()
        self.check()
