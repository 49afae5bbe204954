"""The store by which two processes make a communicator, over a connection that both have already."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock

from torch.distributed.distributed_c10d import Store


class PairStore(Store):
    """Keys and values that two processes set. `post` sends a message to the other, `receive` awaits one."""

    def __init__(self, post: Callable[[bytes], None], receive: Callable[[], bytes]) -> None:
        super().__init__()
        self._post, self._receive, self._lock = post, receive, Lock()
        self._values: dict[str, bytes] = {}
        self._is_open = True

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value here and at the other process."""
        if self._is_open:
            name, value = key.encode(), value.encode() if isinstance(value, str) else value
            self._values[key] = value
            self._post(len(name).to_bytes(4, "little") + name + value)

    def get(self, key: str) -> bytes:
        """Return a value, once either process has set it."""
        with self._lock:
            while key not in self._values:
                message = self._receive()
                end = 4 + int.from_bytes(message[:4], "little")
                self._values[message[4:end].decode()] = message[end:]
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Return once all keys have values. `receive` has a deadline of its own."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values here."""
        return all(key in self._values for key in keys)

    def close(self) -> None:
        """Send nothing more: the communicator is made."""
        self._is_open = False
