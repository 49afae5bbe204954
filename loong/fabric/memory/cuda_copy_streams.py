"""Copy streams on GPUs: CUDA streams where copy engines move bytes and single warps handle flags."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from loong.fabric.lanes import Lane
from loong.fabric.memory.arena import Arena
from loong.fabric.memory.cuda_memory import copy_bytes
from loong.kernels.exchange import signals
from loong.kernels.launch_queue import LaunchQueue

_URGENT = -1  # so that a flag's warp runs before the next block of attention
_MOST_AHEAD, _MARKED = 32, 8  # transfers, each with two flags: ahead of the device, and up to an event


class CudaCopyStream:
    """Implements CopyStream for memory of a GPU."""

    def __init__(self, arena: Arena, lane: Lane) -> None:
        self._arena, self._deadline = arena, arena.deadline(lane)
        self._stream = torch.cuda.Stream(priority=_URGENT)  # type: ignore[no-untyped-call]  # torch's own
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        self._queue = LaunchQueue(lambda: self._stream, _MOST_AHEAD, _MARKED)
        self._load_kernels()

    def follow(self) -> None:
        """See CopyStream."""
        self._stream.wait_stream(self._current())

    def mark(self) -> Callable[[], None]:
        """See CopyStream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return lambda: self._current().wait_event(event)

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """See CopyStream."""
        address = self._arena.host_addresses[rank] + offset
        self._copy(address, tensor.data_ptr(), tensor.nbytes)

    def pull(self, offset: int, tensor: Tensor) -> None:
        """See CopyStream."""
        address = self._arena.memory.data_ptr() + offset
        self._copy(tensor.data_ptr(), address, tensor.nbytes)

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """See CopyStream."""
        addresses, deadline = self._arena.addresses, self._deadline
        signals.signal(addresses, offset, members, epoch, deadline, stream=self._stream.cuda_stream)

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """See CopyStream."""
        memory, deadline = self._arena.memory, self._deadline
        signals.wait(memory, offset, epoch, source, deadline, stream=self._stream.cuda_stream)

    def drain(self) -> None:
        """See CopyStream."""
        self._stream.synchronize()
        self._current().synchronize()

    def close(self) -> None:
        """See CopyStream."""
        self.drain()

    def aside(self) -> AbstractContextManager[object]:
        """See CopyStream."""
        return torch.cuda.stream(self._aside)

    def _load_kernels(self) -> None:
        """Load the kernels by signaling no rank and waiting for nothing.

        A driver may wait for the device before it loads a kernel. Later, the device may be in a step that
        waits for another process, whose driver waits in the same way.
        """
        self.signal(0, 0, 0)
        self.wait(0, 0, 0)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        copy_bytes(target, source, num_bytes, self._stream.cuda_stream)
        self._queue.add(1)

    def _current(self) -> torch.cuda.Stream:
        """Return the calling thread's stream. torch finds it five times faster if the device is given."""
        return torch.cuda.current_stream(self._arena.memory.device.index)
