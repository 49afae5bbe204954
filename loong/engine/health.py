"""The health of an engine, by its progress and by the instances that do not serve."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from loong.core.placement import InstanceId
from loong.core.snapshot import Snapshot

HEALTHY_SILENCE_SECONDS = 4.0  # without a heartbeat; the interval is 1 s


class HealthState(Enum):
    """An engine is ok, serves with fewer instances than it should have, or does not serve."""

    OK = "ok"
    DEGRADED = "degraded"
    DEAD = "dead"


class Trouble(Enum):
    """The reason why an instance does not serve."""

    RESTARTING = "restarting"
    SILENT = "silent"
    DRAINING = "draining"  # as an operator asked for
    QUARANTINED = "quarantined"


_WORDS = {
    Trouble.RESTARTING: "was lost and is being started again",
    Trouble.DRAINING: "takes nothing new, and leaves once it is empty",
    Trouble.QUARANTINED: "is quarantined: it has failed, and is not started again",
    Trouble.SILENT: f"has been silent for more than {HEALTHY_SILENCE_SECONDS:g} s",
}


@dataclass(frozen=True, slots=True)
class Health:
    """A state, its reason, and the instances that do not serve."""

    state: HealthState = HealthState.OK
    message: str = "ok"
    troubles: Mapping[InstanceId, Trouble] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Return whether it serves."""
        return self.state is not HealthState.DEAD


def dead(reason: str) -> Health:
    """Return the health of an engine that does not serve."""
    return Health(HealthState.DEAD, reason)


def health_of(
    snapshot: Snapshot,
    silences: Mapping[InstanceId, float],
    quarantined: Set[InstanceId] = frozenset(),
    trouble: str = "",
) -> Health:
    """Return the health by the instances: it is dead if none serves. Those that are to leave do no harm.

    `silences` are the seconds since an instance was last heard from. Those in `quarantined` do not return.
    `trouble` is the reason why none can return, an empty string if there is none.
    """
    troubles = dict.fromkeys(snapshot.draining_ids, Trouble.DRAINING)
    troubles |= dict.fromkeys(quarantined, Trouble.QUARANTINED)
    troubles |= dict.fromkeys((*snapshot.returning, *snapshot.returning_memory), Trouble.RESTARTING)
    silent = {i for i, seconds in silences.items() if seconds > HEALTHY_SILENCE_SECONDS}
    troubles |= dict.fromkeys(silent, Trouble.SILENT)
    words = [f"instance {i} {_WORDS[troubles[i]]}" for i in sorted(troubles)]
    message = "; ".join([trouble, *words] if trouble else words)
    if snapshot.pools.keys() <= silent:
        return Health(HealthState.DEAD, message or "no instance is left", troubles)
    if not message:
        return Health()
    is_ok = not trouble and set(troubles.values()) == {Trouble.DRAINING}
    return Health(HealthState.OK if is_ok else HealthState.DEGRADED, message, troubles)
