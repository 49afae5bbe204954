"""The sizes of short kernels, after which other streams of a shared device get processors."""

from collections.abc import Sequence

from loong.kernels.attend_task import AttendTask

SHORT_ROWS = 1024  # of a matrix product
_WIDTH = 8192  # columns of such a product, or keys of as many queries


def short_width(num_rows: int) -> int:
    """Return the most columns of a short product of `num_rows` rows, or keys of as many queries."""
    return SHORT_ROWS // max(1, min(num_rows, SHORT_ROWS)) * _WIDTH


def turns_of(tasks: Sequence[AttendTask], most_keys: int) -> list[list[AttendTask]]:
    """Return the tasks in turns of up to `most_keys` keys of each, the first keys first."""
    turns: list[list[AttendTask]] = []
    for task in tasks:
        for number, first in enumerate(range(0, task.num_keys, most_keys)):
            if number == len(turns):
                turns.append([])
            turns[number].append(
                task._replace(
                    key_row=task.key_row + first,
                    num_keys=min(most_keys, task.num_keys - first),
                    first_key=task.first_key + first * task.key_step,
                )
            )
    return turns


def keys_of_turn(tasks: Sequence[AttendTask]) -> int:
    """Return the most keys of each task in a turn, so that each turn is short."""
    longest_first = sorted(tasks, key=lambda task: -task.num_keys)
    most_keys, num_queries = max(1, longest_first[0].num_keys) if tasks else 1, 0
    for task in longest_first:
        num_queries += task.num_queries
        if task.num_keys > (width := short_width(num_queries)):
            most_keys = width
    return most_keys
