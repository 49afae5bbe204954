"""An executor whose workers a test stands for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from loong.executor.endpoints import Endpoints
from loong.executor.lookahead import LookaheadMargin
from loong.executor.workers import WorkersExecutor

WORKERS = ((0, 0), (0, 1), (1, 0), (1, 1))


@contextmanager
def executor_and_reports(
    lookahead: LookaheadMargin | None = None,
) -> Iterator[tuple[WorkersExecutor, "zmq.Socket[bytes]"]]:
    """Yield an executor of two instances of two ranks, and the socket that stands for all its workers."""
    with TemporaryDirectory() as name, zmq.Context() as context, context.socket(zmq.PUSH) as reports:
        folder = Path(name)
        commands = {(i, rank): f"ipc://{folder}/{i}-{rank}" for i, rank in WORKERS}
        endpoints = Endpoints(f"ipc://{folder}/reports", commands, num_instances=2)
        executor = WorkersExecutor(endpoints, lookahead)
        reports.connect(f"ipc://{folder}/reports")
        try:
            yield executor, reports
        finally:
            executor.close()
