"""Tracks how long instances have been idle, since an idle instance starts its next batch slowly."""

from collections.abc import Iterable

from loong.core.placement import InstanceId

# Seconds after which a processor has slept and its caches are cold. Shorter pauses change nothing.
IDLE_SECONDS = 0.02


class IdleTracker:
    """The times until which instances worked. An instance that has not worked yet counts from time 0."""

    def __init__(self) -> None:
        self._worked_until: dict[InstanceId, float] = {}

    def work(self, instance_ids: Iterable[InstanceId], until: float) -> None:
        """Record that these instances worked until this time."""
        self._worked_until.update(dict.fromkeys(instance_ids, until))

    def were_idle(self, instance_ids: Iterable[InstanceId], now: float) -> bool:
        """Return whether any of these instances has been idle for longer than `IDLE_SECONDS`."""
        return any(
            now - self._worked_until.get(instance_id, 0.0) > IDLE_SECONDS for instance_id in instance_ids
        )
