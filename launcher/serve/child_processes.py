"""Child processes of a server, of any kind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from threading import Thread

from loong.child import config_line, signals_held
from loong.logs import child_stderr

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_running: "set[ChildProcess]" = set()


class ChildProcess:
    """A process that runs `main` of a module, in a session of its own. Closing its standard input ends it."""

    def __init__(
        self,
        module: str,
        config: object,
        *,
        arguments: Iterable[str] = (),
        descriptors: Iterable[int] = (),
        environment: Mapping[str, str],
    ) -> None:
        """Start it with the variables of this process and those of `environment`. It inherits `descriptors`.

        The process reads `config` with `loong.child.config_of`.
        """
        self.returncode: int | None = None
        self._ended = asyncio.get_running_loop().create_future()
        with signals_held():  # an event loop's own way to start processes would let them through
            self._process = subprocess.Popen(  # noqa: S603  a command of our own making
                [sys.executable, "-P", "-c", f"from {module} import main; main()", *arguments],
                stdin=subprocess.PIPE,
                stderr=child_stderr(),
                pass_fds=tuple(descriptors),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._process.pid
        _running.add(self)
        attend = (asyncio.get_running_loop(), config_line(config))
        Thread(target=self._attend, args=attend, name=f"process {self.pid}", daemon=True).start()

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def _attend(self, loop: asyncio.AbstractEventLoop, config: bytes) -> None:
        """Write the configuration to its input, and wait for its end: either may take long."""
        stdin = self._process.stdin
        assert stdin is not None  # a pipe
        with suppress(BrokenPipeError), stdin:
            stdin.write(config)
            stdin.flush()
            self._process.wait()
        code = self._process.wait()
        _running.discard(self)
        with suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(self._end, code)

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
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


async def stop(process: ChildProcess) -> None:
    """Wait for a process that was asked to end, and kill it if it does not."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        logger.warning("process %d did not end within %.0f s; killing it", process.pid, _STOP_SECONDS)
        process.kill()
        await process.wait()
