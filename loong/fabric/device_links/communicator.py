"""The communicator of a device link: two processes, and messages between them in one order."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store


class Communicator(Protocol):
    """Moves tensors of a device between two processes, which call `transfer` in the same order.

    A message without a receiver may block all later ones.
    """

    def transfer(self, sent: Tensor | None, come: Tensor | None) -> Sequence[dist.Work]:
        """Begin to send a tensor and to receive one, at the same time."""

    def abort(self) -> None:
        """End all transfers at once, on the device as well. The communicator is then of no use.

        For any thread. It may take long, or hang.
        """


# Makes the communicator of process 0 or 1 of two. Both call it at the same time, with a store that both see.
ConnectCommunicator = Callable[[Store, int], Communicator]
