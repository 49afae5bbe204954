"""Until when instances have worked, and so whether they begin slowly with what comes next."""

from collections.abc import Iterable

from loong.core.placement import InstanceId

REST = 0.02  # seconds: beyond, a processor has slept and its caches are cold; shorter pauses change nothing


class Rests:
    """Until when instances have worked. Before they are first seen to, they are taken to have at time 0."""

    def __init__(self) -> None:
        self._worked_until: dict[InstanceId, float] = {}

    def work(self, instance_ids: Iterable[InstanceId], until: float) -> None:
        """These have worked."""
        self._worked_until.update(dict.fromkeys(instance_ids, until))

    def have_rested(self, instance_ids: Iterable[InstanceId], now: float) -> bool:
        """Whether one of these, none of which works now, has rested before."""
        return any(now - self._worked_until.get(instance_id, 0.0) > REST for instance_id in instance_ids)
