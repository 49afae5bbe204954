"""Runs a function in several real processes at once, and leaves none behind.

Processes are forked from one server that has imported what is slow to import, so starting them takes
milliseconds.
"""

import importlib.util
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from time import monotonic
from types import ModuleType
from typing import TypeVar

from loong.worker.config import ENVIRONMENT

Result = TypeVar("Result")

PRELOADED = [
    "pytest",
    "triton",
    "transformers.generation.utils",
    "loong.fabric.memory.symmetric_fabric",
    "loong.scheduler.policy",
    "loong.worker.backend",
    "loong.worker.process",
]
CAUSE_SECONDS = 5.0  # after the first failure: another rank's may be why


@dataclass(frozen=True, slots=True)
class Exited:
    """Stands for the result of a process that ended without giving one; negative codes are signals."""

    exit_code: int | None


class RankFailedError(AssertionError):
    """A function raised in its process, or did not end in time; carries the traceback from there."""


def context() -> ForkServerContext:
    """Return the context whose processes (and barriers, queues) belong together."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(PRELOADED)
    return forking


def run_on_ranks(
    function: Callable[..., Result], num_ranks: int, *args: object, seconds: float = 150.0
) -> list[Result | Exited]:
    """Call `function(rank, *args)` in `num_ranks` processes; return the results.

    `function` is at the top level of a module, which may be a test's. Raises RankFailedError if one raised.
    Processes that still run afterwards, or are stopped, are killed.
    """
    path, name = function.__code__.co_filename, function.__name__
    connections: list[Connection] = []
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(num_ranks):
            receiving, sending = context().Pipe(duplex=False)
            process = context().Process(target=_report, args=(sending, path, name, rank, args), daemon=True)
            process.start()
            sending.close()
            connections.append(receiving)
            processes.append(process)
        return _collect(connections, processes, monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for connection in connections:
            connection.close()


def _collect(
    connections: list[Connection], processes: list[ForkServerProcess], deadline: float
) -> list[Result | Exited]:
    results: dict[int, Result | Exited] = {}
    failures: list[str] = []
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
        if not ready:
            failures += [f"ranks {sorted(waiting.values())} did not end in time"]
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                failure, result = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join()
                result, failure = Exited(processes[rank].exitcode), None
            if failure is not None:
                failures.append(f"rank {rank}:\n{failure}")
                deadline = min(deadline, monotonic() + CAUSE_SECONDS)
            results[rank] = result
    if failures:
        raise RankFailedError("\n".join(failures))
    return [results[rank] for rank in range(len(connections))]


def _report(connection: Connection, path: str, name: str, rank: int, args: tuple[object, ...]) -> None:
    os.environ |= ENVIRONMENT
    try:
        result = getattr(load(path), name)(rank, *args)
    except BaseException:
        connection.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        raise
    else:
        connection.send_bytes(pickle.dumps((None, result)))  # tensors by value, not as shared memory
    with suppress(OSError):
        connection.close()


def load(path: str) -> ModuleType:
    """The module in file `path`; pytest imports test files under names that another process cannot import."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    spec = importlib.util.spec_from_file_location("module_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
