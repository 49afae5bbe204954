"""Attention of query blocks over KV on this device, as calls of the device's kernels."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from loong.core.plan import QueryBlock
from loong.core.positions import at_or_after
from loong.kernels.attend_task import AttendTask
from loong.model.device import AttendTable, Device


def tasks_of(
    block: QueryBlock, query_row: int, key_row: int, kv: Iterable[range], window: int | None = None
) -> tuple[AttendTask, ...]:
    """Return the tasks of a block over KV at `kv`, whose rows follow each other from `key_row`.

    Adjoining keys that every query sees make one task. With a `window`, tasks keep true positions, and have
    no keys before the window of the first query.
    """
    if window is not None:
        return tuple(_tasks_within(block, query_row, key_row, kv, window))
    tasks: list[AttendTask] = []
    num_queries, full_until = len(block.positions), -1
    for positions in kv:
        if not positions or positions[0] > block.positions[-1]:
            pass  # no query sees these keys
        elif positions[-1] > block.positions[0]:
            tasks.append(AttendTask.causal(query_row, block.positions, key_row, positions))
        elif full_until == key_row:
            before = tasks.pop()
            num_keys = before.num_keys + len(positions)
            tasks.append(AttendTask.full(query_row, num_queries, before.key_row, num_keys))
            full_until = key_row + len(positions)
        else:
            tasks.append(AttendTask.full(query_row, num_queries, key_row, len(positions)))
            full_until = key_row + len(positions)
        key_row += len(positions)
    return tuple(tasks)


def _tasks_within(
    block: QueryBlock, query_row: int, key_row: int, kv: Iterable[range], window: int
) -> Iterator[AttendTask]:
    for positions in kv:
        (seen,) = at_or_after((positions,), block.positions[0] - window + 1)
        if seen and seen[0] <= block.positions[-1]:
            first_row = key_row + len(positions) - len(seen)
            yield AttendTask.causal(query_row, block.positions, first_row, seen)
        key_row += len(positions)


def tables_of(
    tasks: Iterable[Sequence[AttendTask]], device: Device, window: int | None = None
) -> tuple[AttendTable, ...]:
    """Return tables with the tasks of several blocks, as few as possible: no query is twice in one table."""
    rounds = ([task for task in tasks_now if task is not None] for tasks_now in zip_longest(*tasks))
    return tuple(device.table(joined(tasks_now), window) for tasks_now in rounds)


def joined(tasks: Iterable[AttendTask]) -> list[AttendTask]:
    """Return the tasks with those of adjoining queries joined, if the queries all see the same keys."""
    whole: list[AttendTask] = []
    for task in tasks:
        last = whole[-1] if whole else None
        if (
            last is not None
            and task
            == last._replace(query_row=last.query_row + last.num_queries, num_queries=task.num_queries)
            and task.query_step == 0
        ):
            whole[-1] = last._replace(num_queries=last.num_queries + task.num_queries)
        else:
            whole.append(task)
    return whole
