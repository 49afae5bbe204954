"""The lanes of a process: work whose waits end together, on streams of its own."""

from enum import IntEnum, unique

from loong.core.instance import MAX_SERVED_LEASES
from loong.fabric.traffic import Plane


@unique
class Lane(IntEnum):
    """Each lane has one batch or migration at a time.

    Batches of other groups that this instance serves are in the lanes of the service: steps that the host
    launches, where short ones do not wait for long ones, and leases whose steps are captured.
    """

    BATCH = 0
    MIGRATION = 1
    SHORT_STEP = 2
    LONG_STEP = 3
    LEASE_1 = 4
    LEASE_2 = 5
    LEASE_3 = 6
    LEASE_4 = 7

    @property
    def plane(self) -> Plane:
        """The plane of its messages."""
        return Plane.SERVICE if self >= Lane.SHORT_STEP else Plane(self)

    @property
    def is_captured(self) -> bool:
        """Return whether its steps are captured, so that only control messages are exchanged."""
        return self in LEASE_LANES


STEP_LANES = (Lane.SHORT_STEP, Lane.LONG_STEP)
LEASE_LANES = (Lane.LEASE_1, Lane.LEASE_2, Lane.LEASE_3, Lane.LEASE_4)
assert len(LEASE_LANES) == MAX_SERVED_LEASES, "a lane for each lease"
