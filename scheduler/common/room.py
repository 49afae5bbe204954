"""The room that requests leave on instances, if each goes on to its declared end."""

from collections.abc import Iterable
from dataclasses import dataclass

from loong.core.placement import InstanceId
from loong.core.request import RequestView


@dataclass(frozen=True, slots=True)
class Room:
    """Slots of each instance: the `free` ones, and the `spare` ones among them.

    The spare ones are those that no request at home there may still need: KV of a request grows at its home.
    """

    free: dict[InstanceId, int]
    spare: dict[InstanceId, int]

    @classmethod
    def left_by(
        cls, growing: Iterable[tuple[RequestView, InstanceId | None]], free: dict[InstanceId, int]
    ) -> "Room":
        """Return the room that these requests with their homes leave of free slots."""
        spare = free.copy()
        for view, home_id in growing:
            if home_id in spare:
                spare[home_id] -= view.num_tokens_to_come
        return cls(free.copy(), spare)

    @property
    def sparest_id(self) -> InstanceId:
        """Return the instance with the most spare slots."""
        return max(self.spare, key=lambda i: (self.spare[i], -i))

    @property
    def freest_id(self) -> InstanceId:
        """Return the instance with the most free slots."""
        return max(self.free, key=lambda i: (self.free[i], -i))

    def take(self, instance_id: InstanceId, num_tokens: int, num_to_come: int = 0) -> None:
        """Take slots for KV that arrives, and spare ones for more that is to come."""
        self.free[instance_id] -= num_tokens
        self.spare[instance_id] -= num_tokens + num_to_come
