"""Deadlines on a clock that almost stops while this process is paused."""

from collections.abc import Callable
from threading import Condition

_NUM_PARTS = 20


def wait_for(condition: Condition, is_met: Callable[[], bool], seconds: float) -> bool:
    """Wait as `condition.wait_for` does, and return whether `is_met`.

    A pause of this process (SIGSTOP, a frozen cgroup) counts as at most a twentieth of `seconds`. Messages
    from that time are handled after it.
    """
    return any(condition.wait_for(is_met, seconds / _NUM_PARTS) for _ in range(_NUM_PARTS))
