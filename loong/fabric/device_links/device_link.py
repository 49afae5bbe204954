"""One device link: a communicator of this process and one peer, which may be ended and made again."""

from collections import deque
from collections.abc import Sequence
from threading import Lock, Thread
from time import monotonic
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.device_links.communicator import Communicator

ABORT_SECONDS = 15.0


class LinkState(NamedTuple):
    """One end of a link between two transfers. A link is made anew in a later generation."""

    generation: int = 0
    is_up: int = 0
    num_sent: int = 0
    num_received: int = 0

    def fits(self, other: "LinkState") -> bool:
        """Return whether both ends can go on: each has begun to receive all that the other has sent."""
        return bool(
            self.is_up
            and other.is_up
            and self.generation == other.generation
            and (self.num_sent, self.num_received) == (other.num_received, other.num_sent)
        )


class DeviceLink:
    """The end of the link to one peer. One thread transfers, and any thread may end the link."""

    def __init__(self, name: str) -> None:
        """Set up a link that is down. `name` is the peer's in errors."""
        self._name, self._lock = name, Lock()
        self._communicator: Communicator | None = None
        self._generation = self._num_sent = self._num_received = 0
        self._in_flight: deque[dist.Work] = deque()
        self._since = 0.0  # when the oldest transfer in flight became the oldest

    @property
    def state(self) -> LinkState:
        """The state that the peer needs to know."""
        is_up = int(self._communicator is not None)
        return LinkState(self._generation, is_up, self._num_sent, self._num_received)

    def renew(self, generation: int) -> None:
        """End the present communicator; the next has this generation, whether it is made or not."""
        self.abort()
        self._generation, self._num_sent, self._num_received = generation, 0, 0

    def use(self, communicator: Communicator) -> None:
        """Use a new communicator from now on."""
        self._communicator = communicator

    def transfer(self, sent: Tensor | None, come: Tensor | None) -> Sequence[dist.Work] | None:
        """Begin to send and to receive a tensor. Returns None if the link is down."""
        if (communicator := self._communicator) is None:
            return None
        self._num_sent += sent is not None
        self._num_received += come is not None
        try:
            works = communicator.transfer(sent, come)
        except RuntimeError:  # the backend's own, of a link that broke
            self.abort()
            return None
        with self._lock:
            if not self._in_flight:
                self._since = monotonic()
            self._in_flight.extend(works)
        return works

    def silent_seconds(self) -> float | None:
        """Return how long the oldest transfer in flight has been the oldest. None: there is none."""
        with self._lock:
            while self._in_flight and self._in_flight[0].is_completed():
                self._in_flight.popleft()
                self._since = monotonic()
            return monotonic() - self._since if self._in_flight else None

    def abort(self) -> None:
        """End all transfers, unless another thread does. Raises ClusterError if that takes too long.

        The device may then be stuck, so the process cannot go on.
        """
        with self._lock:
            communicator, self._communicator = self._communicator, None
            self._in_flight.clear()
        if communicator is None:
            return
        thread = Thread(target=communicator.abort, name="fabric-abort", daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)
        if thread.is_alive():
            raise ClusterError(f"the communicator with {self._name} did not end within {ABORT_SECONDS:g} s")
