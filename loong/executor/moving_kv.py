"""The links of simulated instances, which carry KV that moves."""

from collections import defaultdict
from typing import NamedTuple

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import KVMigration

_MANY_TOKENS = 1_000_000  # whose seconds are nearly all of a link, not of messages


class Carrying(NamedTuple):
    """The time in which a link of an instance carries a move."""

    instance_id: InstanceId
    begin: float
    end: float


class MovingKV:
    """Moves of KV: each instance has a link for what leaves and one for what comes, which moves share.

    A link carries one move after the other. A move ends when both of its links have carried it. An instance
    that computes meanwhile loses some of its time to reading or storing what moves.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        # When the links are free again: of what leaves, and of what comes.
        self._leaving: dict[InstanceId, float] = defaultdict(float)
        self._coming: dict[InstanceId, float] = defaultdict(float)
        self._end = 0.0  # of all moves

    def start(self, migration: KVMigration, now: float) -> tuple[float, tuple[Carrying, Carrying]]:
        """Return when a move that starts now ends, and when its two links carry it."""
        source_id, destination_id = migration.segment.instance_id, migration.destination_id
        move_time = self._cost_model.migration_time
        message = move_time(0, source_id, destination_id)
        seconds = move_time(len(migration.segment.positions), source_id, destination_id) - message
        carrying = []
        for links, instance_id in ((self._leaving, source_id), (self._coming, destination_id)):
            begin = max(now, links[instance_id])
            links[instance_id] = begin + seconds
            carrying.append(Carrying(instance_id, begin, begin + seconds))
        leaving, coming = carrying
        end = message + max(leaving.end, coming.end)
        self._end = max(self._end, end)
        return end, (leaving, coming)

    def lost_seconds(self, instance_id: InstanceId, begin: float, end: float) -> float:
        """Return the seconds that a step of an instance between two times loses to moves."""
        if begin >= self._end:
            return 0.0
        until = (links[instance_id] for links in (self._leaving, self._coming))
        return self.lost_share * sum(max(0.0, min(free, end) - begin) for free in until)

    @property
    def lost_share(self) -> float:
        """The share of its time that an instance loses while one of its links carries KV."""
        link = self._cost_model.migration_time(_MANY_TOKENS, 0, 1)
        return min(1.0, self._cost_model.copying_time(_MANY_TOKENS) / link) if link else 0.0
