"""The workers that use room of one engine for another, as both engines see them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from loong.core.kv_layout import LentSlots
from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """The workers that are to use room of another engine: where they take commands, and a config of each.

    `host_id` is their host, as plans of this engine know it.
    """

    commands: Mapping[WorkerId, str]
    configs: tuple[str, ...]
    host_id: int = 0


class RoomWorkers(Protocol):
    """Starts workers of other engines in room of this one, and describes this engine's own to others."""

    def request(self, instance_id: InstanceId) -> RoomRequest:
        """Return the workers of an instance of this engine, which another engine is to start."""

    def start(
        self,
        loan_id: str,
        lender_id: InstanceId,
        configs: Sequence[str],
        slots: Sequence[LentSlots],
        on_end: Callable[[], None],
    ) -> None:
        """Start the workers of a loan, one for each rank, in slots of an instance of this engine.

        `on_end` is called when all have ended.

        When one ends, all do. Raises `ConfigError` if a config is none.
        """

    def end(self, loan_id: str) -> None:
        """End the workers of a loan at once."""
