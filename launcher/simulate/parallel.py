"""Independent tasks in parallel processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from loong.launcher.garbage import look_rarely_for_garbage

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_order(work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int) -> list[Result]:
    """The results of all tasks, in the order of these."""
    results = dict(_done(work, tasks, min(num_jobs, len(tasks))))
    return [results[index] for index in range(len(tasks))]


def _done(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int
) -> Iterator[tuple[int, Result]]:
    if num_jobs <= 1:
        yield from enumerate(map(work, tasks))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=look_rarely_for_garbage) as pool:
        futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()
