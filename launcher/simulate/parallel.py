"""Independent tasks in parallel processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from loong.launcher.garbage import look_rarely_for_garbage
from loong.launcher.standard_streams import give_up_lost_streams

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
        futures = {pool.submit(_attempt, work, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after a failure nobody waits for the others


def _attempt(work: Callable[[Task], Result], task: Task) -> Result:
    """Return the result. A process whose output cannot be written fails here, and not again at its end."""
    try:
        return work(task)
    except OSError:
        give_up_lost_streams()
        raise
