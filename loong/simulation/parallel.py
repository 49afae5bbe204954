"""Independent tasks in parallel processes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

from loong.processes.gc_tuning import tune_gc
from loong.processes.standard_streams import give_up_lost_streams, printable_streams

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    num_jobs: int,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Return the results of all tasks, in order; `on_result` is called with each as soon as it is known."""
    results: dict[int, Result] = {}
    for index, result in _done(work, tasks, min(num_jobs, len(tasks))):
        results[index] = result
        if on_result is not None:
            on_result(result)
    return [results[index] for index in range(len(tasks))]


def _done(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_jobs: int
) -> Iterator[tuple[int, Result]]:
    if num_jobs <= 1:
        yield from enumerate(map(work, tasks))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, context, initializer=tune_gc) as pool:
        with _interrupts_ignored():  # by the processes, which inherit that: a Ctrl-C is for this one alone
            futures = {pool.submit(_attempt, work, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # the results of the others are not needed
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _attempt(work: Callable[[Task], Result], task: Task) -> Result:
    """Return the result. A process whose output cannot be written fails here, and not again at its end."""
    try:
        with printable_streams():
            return work(task)
    except OSError:
        give_up_lost_streams()
        raise


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
