"""Finds the worker that caused a loss: the first that failed, not one that failed because of it."""

import asyncio
from collections.abc import Callable

from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId
from loong.messages.wire import WorkerFailed

MAX_WAIT_SECONDS = 5.0  # from a report about a peer to the end of the peer's process, which must free memory


class Losses:
    """The failures of workers; `declare` is called with each instance that is lost, and why.

    That is the instance that failed first, not those that failed because of it.

    In a ring, the survivors report that a peer did not do its part before the end of its process is known.
    Such a report only says that another worker failed. An error of a worker's own, and the end of one
    that had reported nothing, are declared at once.
    """

    def __init__(
        self, declare: Callable[[InstanceId, str], None], max_wait: float = MAX_WAIT_SECONDS
    ) -> None:
        self._declare, self._max_wait = declare, max_wait
        self._about_peers: dict[WorkerId, WorkerFailed] = {}  # by who reported it
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[WorkerId] = set()  # those that end because of another, until that is declared
        self._ended: dict[WorkerId, str] = {}  # those of them that have ended, and how
        self._declared: set[InstanceId] = set()

    def take(self, report: WorkerFailed, *, lives_on: bool = False) -> None:
        """Record that a worker failed, by an error of its own or because another did not do its part.

        A worker ends then, unless it `lives_on` and only left a batch.
        """
        if report.blamed is None:
            self._declare_once(report.instance_id, report.message)
            return
        if report.blamed[0] in self._declared or report.instance_id in self._declared:
            return
        worker_id = report.instance_id, report.tp_rank
        self._about_peers.setdefault(worker_id, report)
        if not lives_on:
            self._ending.add(worker_id)
        self._set_timer()

    def end(self, worker_id: WorkerId, reason: str) -> None:
        """Record that a worker has ended. One that ends because of another is declared after that one."""
        if worker_id in self._ending:
            self._ended[worker_id] = reason
        else:
            self._declare_once(worker_id[0], reason)

    def rejoin(self, instance_id: InstanceId) -> None:
        """Record that a lost instance is there again."""
        self._declared.discard(instance_id)

    def _conclude(self) -> None:
        """Declare a worker that hangs: others blame it, and it blames none.

        Otherwise declare the first reporter.
        """
        self._timer = None
        for report in self._about_peers.values():
            if report.blamed is not None and report.blamed not in self._about_peers:
                reason = f"instance {report.instance_id} reported: {report.message}"
                self._declare_once(report.blamed[0], reason)
                return
        for first in self._about_peers.values():
            self._declare_once(first.instance_id, first.message)
            return

    def _set_timer(self) -> None:
        if self._about_peers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_wait, self._conclude)

    def _declare_once(self, instance_id: InstanceId, reason: str) -> None:
        """Declare an instance, which explains the reports of its workers and about them."""
        if instance_id in self._declared:
            return
        self._declared.add(instance_id)
        if self._timer is not None:  # reports that come later wait in full for the end of a process
            self._timer.cancel()
            self._timer = None
        self._about_peers = {
            worker_id: report
            for worker_id, report in self._about_peers.items()
            if worker_id[0] != instance_id and (report.blamed is None or report.blamed[0] != instance_id)
        }
        self._declare(instance_id, reason)
        ended, self._ended = self._ended, {}
        self._ending.clear()
        for worker_id, how in ended.items():
            self._declare_once(worker_id[0], how)
        self._set_timer()
