"""DGFM of DistKV-LLM: debts along a cycle of instances are swapped home by the least of them.

Each instance of a cycle then has KV of its own where it kept that of another, and what it uses is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.placement import InstanceId

Debts: TypeAlias = Mapping[tuple[InstanceId, InstanceId], int]
"""The blocks of each debtor that each creditor keeps."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks that go home along a cycle: each instance is debtor of the next, the last one of the first."""

    instance_ids: tuple[InstanceId, ...]
    num_blocks: int

    @property
    def edges(self) -> tuple[tuple[InstanceId, InstanceId], ...]:
        """Return the debtor and the creditor of each debt of the cycle."""
        return tuple(zip(self.instance_ids, (*self.instance_ids[1:], self.instance_ids[0]), strict=True))


def swaps(debts: Debts, least: int) -> list[Swap]:
    """Return swaps of at least `least` blocks, the largest first, until no such cycle is left.

    `least` is 1 or more: it keeps instances from swapping a few blocks again and again.
    """
    left, found = dict(debts), list[Swap]()
    while (swap := widest_cycle(left, least)) is not None:
        found.append(swap)
        for edge in swap.edges:
            left[edge] -= swap.num_blocks
    return found


def widest_cycle(debts: Debts, least: int) -> Swap | None:
    """Return the cycle whose least debt is the largest, by that debt; None if all are below `least`."""
    widths = sorted({width for width in debts.values() if width >= max(1, least)})
    low, high, found = 0, len(widths), None
    while low < high:  # a cycle of wide debts is one of narrower ones, too
        middle = (low + high) // 2
        cycle = _cycle_of({edge for edge, width in debts.items() if width >= widths[middle]})
        if cycle is None:
            high = middle
        else:
            found, low = cycle, middle + 1
    if found is None:
        return None
    swap = Swap(found, 0)
    return Swap(found, min(debts[edge] for edge in swap.edges))


def _cycle_of(edges: set[tuple[InstanceId, InstanceId]]) -> tuple[InstanceId, ...] | None:
    """Return a cycle, the same for equal edges, or None."""
    creditors: dict[InstanceId, list[InstanceId]] = {}
    for debtor_id, creditor_id in sorted(edges):
        creditors.setdefault(debtor_id, []).append(creditor_id)
    done: set[InstanceId] = set()
    for start in creditors:
        path, todo = [start], [iter(creditors[start])]
        while todo:
            following = next(todo[-1], None)
            if following is None:
                done.add(path.pop())
                todo.pop()
            elif following in path:
                return tuple(path[path.index(following) :])
            elif following not in done:
                path.append(following)
                todo.append(iter(creditors.get(following, ())))
    return None
