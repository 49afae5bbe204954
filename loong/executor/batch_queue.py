"""The order of batches: those that run, and those that wait for an instance to end another."""

from collections.abc import Iterable

from loong.core.placement import InstanceId


class BatchQueue:
    """Batches that were submitted and have not ended.

    Every instance runs its own in the order of submission.
    """

    def __init__(self) -> None:
        self._last: dict[InstanceId, int] = {}  # batch submitted to each instance
        self._waits_for: dict[int, set[int]] = {}

    def enqueue(self, batch_id: int, instance_ids: Iterable[InstanceId]) -> bool:
        """Add a batch; return whether it begins at once on these instances."""
        before = {self._last[i] for i in instance_ids if i in self._last}
        self._last.update(dict.fromkeys(instance_ids, batch_id))
        if before:
            self._waits_for[batch_id] = before
        return not before

    def before(self, batch_id: int) -> Iterable[int]:
        """Return the batches that instances of a batch have yet to end before it; not those before these."""
        return self._waits_for.get(batch_id, ())

    def end(self, batch_id: int) -> list[int]:
        """Remove a batch that has ended, or never will; return the batches that begin now."""
        self._last = {i: last for i, last in self._last.items() if last != batch_id}
        self._waits_for.pop(batch_id, None)
        begun = []
        for other_id, before in self._waits_for.items():
            before.discard(batch_id)
            if not before:
                begun.append(other_id)
        for other_id in begun:
            del self._waits_for[other_id]
        return begun
