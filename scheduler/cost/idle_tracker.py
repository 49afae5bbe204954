"""Tracks how long instances have been idle, since an idle instance starts its next batch slowly."""

from collections.abc import Iterable

from loong.core.placement import InstanceId


class IdleTracker:
    """The times until which instances worked. An instance that has not worked yet counts from time 0.

    An instance is idle after `idle_seconds` without work: its processor has slept and its caches are cold.
    """

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._worked_until: dict[InstanceId, float] = {}

    def work(self, instance_ids: Iterable[InstanceId], until: float) -> None:
        """Record that these instances worked until this time."""
        self._worked_until.update(dict.fromkeys(instance_ids, until))

    def were_idle(self, instance_ids: Iterable[InstanceId], now: float) -> bool:
        """Return whether any of these instances has been idle for longer than `idle_seconds`."""
        return any(
            now - self._worked_until.get(instance_id, 0.0) > self._idle_seconds
            for instance_id in instance_ids
        )
