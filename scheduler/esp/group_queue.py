"""A queue of groups by availability, so that each of many short prompts looks at few groups."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

from loong.scheduler.esp.admission import PrefillCandidate
from loong.scheduler.esp.group import Group

_Key: TypeAlias = tuple[float, float, int, int]
"""The sort key of a group: its wait, its decodes an instance, minus its spare slots, and its index."""


class GroupQueue:
    """Groups by when they could begin a prompt. Prompts come in the order of their ranks.

    A wait only grows with rank and with added prompts. So a group at the head whose key is current is the
    best one; an outdated key is replaced. A prompt added to a full step waits for the step's end: groups with
    a prompt longer than `least_long` count as busy for `full` more seconds.
    """

    def __init__(self, groups: Iterable[Group], least_long: float, full: float) -> None:
        self._groups, self._full = list(groups), full
        noted = [(g.available_in, g.num_decodes / g.dop, -g.spare, i) for i, g in enumerate(self._groups)]
        self._calm = [key for key in noted if self._groups[key[-1]].longest <= least_long]
        self._full_ones = [key for key in noted if self._groups[key[-1]].longest > least_long]
        heapify(self._calm)
        heapify(self._full_ones)

    def group_for(self, prefill: PrefillCandidate, demand: int) -> Group | None:
        """Return the group with room for `demand` slots that would finish a prompt first, or None."""
        calm = self._first(self._calm, prefill, demand)
        full = self._first(self._full_ones, prefill, demand) if self._full_ones else None
        if calm is None or full is None:
            first = calm or full
        else:
            is_calm = (calm[0] + prefill.work, *calm[1:]) < (full[0] + self._full, *full[1:])
            first = calm if is_calm else full
        return None if first is None else self._groups[first[-1]]

    def _first(self, queue: list[_Key], prefill: PrefillCandidate, demand: int) -> _Key | None:
        without_room = []
        first = None
        while queue and first is None:
            noted = queue[0]
            group = self._groups[noted[-1]]
            wait = group.wait_of(prefill)
            if wait != noted[0] or group.spare != -noted[2]:
                heapreplace(queue, (wait, noted[1], -group.spare, noted[-1]))
            elif group.spare < demand:
                without_room.append(heappop(queue))
            else:
                first = noted
        for key in without_room:
            heappush(queue, key)
        return first
