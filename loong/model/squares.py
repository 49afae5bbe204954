"""Squares in tables of attention: what kernels that know only causal squares can compute."""

from collections.abc import Sequence
from typing import NamedTuple

from loong.kernels.attend_task import AttendTask


class Square(NamedTuple):
    """Query i of some rows sees keys 0 to i of as many rows."""

    query_row: int
    key_row: int
    size: int


def cut_squares(tasks: Sequence[AttendTask], step: int) -> tuple[tuple[Square, ...], tuple[AttendTask, ...]]:
    """Cut from each task the largest square whose size is a multiple of `step`; the squares, and the rest."""
    squares: list[Square] = []
    rest: list[AttendTask] = []
    for task in tasks:
        square = _largest_square(task, step)
        if square is None:
            rest.append(task)
            continue
        squares.append(square)
        num_done = square.query_row - task.query_row + square.size
        if num_done < task.num_queries:
            rest.append(_after(task, num_done))
    return tuple(squares), tuple(rest)


def _largest_square(task: AttendTask, step: int) -> Square | None:
    """Queries and keys of a stripe each: the first query sees one key, or none if its stripe is behind."""
    if task.query_step != task.key_step:
        return None
    num_seen_by_first = (task.first_query - task.first_key) // task.key_step + 1
    if num_seen_by_first not in (0, 1):
        return None
    num_blind = 1 - num_seen_by_first
    size = min(task.num_queries - num_blind, task.num_keys) // step * step
    return Square(task.query_row + num_blind, task.key_row, size) if size > 0 else None


def _after(task: AttendTask, num_done: int) -> AttendTask:
    """What is left of a task once its first queries are done."""
    return task._replace(
        query_row=task.query_row + num_done,
        num_queries=task.num_queries - num_done,
        first_query=task.first_query + num_done * task.query_step,
    )
