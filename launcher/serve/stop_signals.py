"""The signals that stop a server."""

import asyncio
import logging
import signal

from loong.processes.child import STOP_SIGNALS

logger = logging.getLogger(__name__)


class StopSignals:
    """Events of SIGINT, SIGTERM and SIGHUP: the first asks for a drain, the second for its end.

    Only the first `num_heeded` set these events; one beyond those cancels the task. SIGHUP is never the
    second: a supervisor or a terminal may send it with another. It stays ignored if it was, as under `nohup`.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.num_heeded = 0
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP:
                loop.add_signal_handler(number, self._take)
            elif signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._hang_up)

    def _hang_up(self) -> None:
        if not self.first.is_set():
            self._take()

    def _take(self) -> None:
        heeded = (self.first, self.second)[: self.num_heeded]
        event = next((event for event in heeded if not event.is_set()), None)
        if event is not None:
            event.set()
            if self.num_heeded == 1:
                logger.info("stopping once all API processes are up; a second signal stops at once")
        elif self._task is not None:
            what = "open requests are dropped" if self.first.is_set() else "the server was not up yet"
            logger.warning("stopping at once; %s", what)
            self._task.cancel()
