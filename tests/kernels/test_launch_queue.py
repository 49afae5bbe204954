"""A thread launches at most so far ahead of the device, whatever the sizes of its calls."""

from collections.abc import Sequence

import pytest

from loong.kernels.launch_queue import LaunchQueue


class SlowStream:
    """A stream whose work is done only when somebody has asked twice for an event behind it."""

    def __init__(self) -> None:
        self.num_launched = self.num_done = 0

    def record_event(self) -> "Mark":
        return Mark(self, self.num_launched)


class Mark:
    def __init__(self, stream: SlowStream, num_before: int) -> None:
        self._stream, self._num_before = stream, num_before
        self._was_asked = False

    def query(self) -> bool:
        if self._was_asked:
            self._stream.num_done = max(self._stream.num_done, self._num_before)
        self._was_asked = True
        return self._stream.num_done >= self._num_before


def test_something_else_is_done_during_waits_and_launches() -> None:
    stream, calls = SlowStream(), list[int]()
    queue = LaunchQueue(lambda: stream, most=64, marked=32)  # type: ignore[arg-type,return-value]  # acts as one
    with queue.calling(lambda: calls.append(stream.num_launched - stream.num_done)):
        for _ in range(8):
            stream.num_launched += 32
            queue.add(32)
    assert calls == [32, 64, *[96, 96] * 6]  # after each mark, and while three of them are ahead
    queue.add(320)
    assert len(calls) == 14


@pytest.mark.parametrize("counts", [[1], [12], [31, 12], [1, 1, 12, 1, 1, 12], [300], [2000]], ids=str)
def test_no_more_launches_are_ahead_than_allowed_and_those_of_a_mark(counts: Sequence[int]) -> None:
    stream = SlowStream()
    queue = LaunchQueue(lambda: stream, most=768, marked=32)  # type: ignore[arg-type,return-value]  # acts as one
    most = 0
    for _ in range(500):
        for count in counts:
            stream.num_launched += count
            queue.add(count)
            most = max(most, stream.num_launched - stream.num_done)
    assert most <= max(768, max(counts)) + 32
