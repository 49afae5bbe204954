"""The processors of simulated steps: devices of their own, or the shared cores of one host."""

import heapq
from itertools import count
from math import inf


class Processors:
    """Runs steps, each known by its batch. Beyond `num_cores`, busy processes all slow down in proportion.

    All steps are served at one rate, so they end in the order of their service. The lag of service behind
    time is the only state; with enough cores there is none. Times are virtual seconds and never go back.
    `next_end` is when the next step ends if no other starts before, infinity if none runs.
    """

    def __init__(self, num_cores: float = inf, processes_per_instance: int = 1) -> None:
        self._num_cores, self._processes_per_instance = num_cores, processes_per_instance
        self._steps: list[tuple[float, int, int, int]] = []  # service at its end, order, batch, processes
        self._delays: dict[int, float] = {}  # additional service of steps, by their batches
        self._order = count()
        self._num_busy = 0
        self._rate = 1.0  # of service, in proportion to time
        self._now = self._lag = 0.0
        self.next_end = inf

    def start(self, batch_id: int, now: float, seconds: float, num_instances: int) -> None:
        """Start a step that takes `seconds` on free processors."""
        num_processes = num_instances * self._processes_per_instance
        self._serve_until(now, num_processes)
        heapq.heappush(self._steps, (now - self._lag + seconds, next(self._order), batch_id, num_processes))
        self._see_next_end()

    def delay(self, batch_id: int, seconds: float) -> None:
        """Lengthen the step of a batch by `seconds`."""
        self._delays[batch_id] = self._delays.get(batch_id, 0.0) + seconds
        self._see_next_end()

    def end(self) -> int:
        """Remove the step that ends next; return its batch."""
        _, _, batch_id, num_processes = heapq.heappop(self._steps)
        self._serve_until(self.next_end, -num_processes)
        self._see_next_end()
        return batch_id

    def cancel(self, batch_id: int, now: float) -> None:
        """Remove the step of a batch that will not end."""
        self._serve_until(now, -sum(processes for *_, batch, processes in self._steps if batch == batch_id))
        self._steps = [step for step in self._steps if step[2] != batch_id]
        self._delays.pop(batch_id, None)
        heapq.heapify(self._steps)
        self._see_next_end()

    def _see_next_end(self) -> None:
        while self._steps and (delay := self._delays.pop(self._steps[0][2], 0.0)):
            service_at_end, order, batch_id, num_processes = self._steps[0]
            heapq.heapreplace(self._steps, (service_at_end + delay, order, batch_id, num_processes))
        if not self._steps:
            self.next_end = inf
            return
        service_at_end = self._steps[0][0]
        if self._rate == 1.0:
            end = service_at_end + self._lag
        else:
            end = self._now + (service_at_end - (self._now - self._lag)) / self._rate
        self.next_end = max(self._now, end)  # rounding shall not turn time back

    def _serve_until(self, now: float, num_more: int) -> None:
        """Serve at the present rate until `now`; from then on `num_more` more processes are busy."""
        if self._rate < 1.0:
            self._lag += (now - self._now) * (1.0 - self._rate)
        self._now = now
        self._num_busy += num_more
        self._rate = self._num_cores / self._num_busy if self._num_busy > self._num_cores else 1.0
