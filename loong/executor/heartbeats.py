"""Heartbeats that workers missed, by a clock that stands still while this process is paused."""

from collections.abc import Iterable, Mapping

from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId

MAX_MISSED = 20  # in a row, after which a worker is given up


class Heartbeats:
    """The heartbeats of all workers, `seconds` apart, and how many each has missed in a row.

    A worker misses one at each `count_missed` since its last message. `count_missed` is called every
    `seconds`. So a pause of this process (SIGSTOP, a frozen cgroup) costs every worker one heartbeat at most.
    """

    def __init__(self, workers: Iterable[WorkerId], seconds: float) -> None:
        self.seconds = seconds
        self._num_missed = dict.fromkeys(workers, 0)

    def add(self, workers: Iterable[WorkerId]) -> None:
        """Expect the heartbeats of these workers as well."""
        self._num_missed.update(dict.fromkeys(workers, 0))

    def drop(self, workers: Iterable[WorkerId]) -> None:
        """Expect no more heartbeats of lost workers."""
        for worker_id in workers:
            self._num_missed.pop(worker_id, None)

    def hear(self, worker_id: WorkerId) -> None:
        """Record a heartbeat of a worker, unless it has yet to be added."""
        if worker_id in self._num_missed:
            self._num_missed[worker_id] = 0

    def count_missed(self) -> None:
        """Record that a heartbeat of every worker was due."""
        for worker_id in self._num_missed:
            self._num_missed[worker_id] += 1

    @property
    def silences(self) -> Mapping[InstanceId, float]:
        """Return the longest silence of a worker of each instance, in seconds."""
        longest: dict[InstanceId, float] = {}
        for (instance_id, _), num_missed in self._num_missed.items():
            longest[instance_id] = max(longest.get(instance_id, 0.0), self.seconds * num_missed)
        return longest

    def lost(self) -> WorkerId | None:
        """Return the worker that has missed the most heartbeats, if these are `MAX_MISSED`."""
        worker_id = max(self._num_missed, key=self._num_missed.__getitem__, default=None)
        return worker_id if worker_id and self._num_missed[worker_id] >= MAX_MISSED else None
