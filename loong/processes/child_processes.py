"""Child processes of a server, of any kind."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Event

logger = logging.getLogger(__name__)

HOST_LOST = 1 << 16  # instead of an exit code, of a process whose host has gone
FORK_SERVER_LOST = HOST_LOST + 1  # of a process that was not forked
STOP_SECONDS = 5.0
_running: "set[ChildProcess]" = set()


class ChildProcess:
    """A process that a fork server starts, in a session of its own. Closing its standard input ends it."""

    def __init__(self, send_signal: Callable[[int], None]) -> None:
        """Take how it is sent a signal. It may not have been forked yet."""
        self.returncode: int | None = None
        self.pid: int | None = None  # until it is forked
        self.send_signal = send_signal
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._has_ended = Event()
        _running.add(self)

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if not self._has_ended.is_set():
            self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Pass its exit code to those that wait for it."""
        self._has_ended.set()
        _running.discard(self)
        with suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._ended.set_result(code)


def signal_children(number: int) -> None:
    """Send a signal to all processes that were started and have not ended; from any thread."""
    for process in tuple(_running):
        process.send_signal(number)


def guarded(work: Coroutine[None, None, None], fail: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Return a task whose failure is passed to `fail`, since nothing else awaits it."""

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task = asyncio.create_task(work)
    task.add_done_callback(report)
    return task


def how_it_ended(code: int) -> str:
    """Return a process's exit code in words."""
    if code == HOST_LOST:
        return "was on a host that is lost"
    if code == FORK_SERVER_LOST:
        return "was not started: the fork server ended"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


async def stop(process: ChildProcess, seconds: float = STOP_SECONDS) -> None:
    """Wait for a process that was asked to end, and kill it if it does not within some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        logger.warning("process %s did not end within %.0f s; killing it", process.pid, seconds)
        process.kill()
        await process.wait()
