"""Child processes of a server, of any kind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socketpair
from threading import Event, Lock, Thread

from loong.child import config_line, signals_held
from loong.launcher.serve.fork_server_process import MAX_MESSAGE_BYTES
from loong.logs import child_stderr

logger = logging.getLogger(__name__)

STDERR = 2
HOST_LOST = 1 << 16  # instead of an exit code, of a process whose host has gone
_PROGRAM = "loong.launcher.serve.fork_server_process"
_STOP_SECONDS = 5.0
_running: "set[ChildProcess]" = set()


class ForkServer:
    """A process that has imported a module, and forks others that run its `main`."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Start it with the variables of this process and those of `environment`, which all others get."""
        self._lock = Lock()
        self._running: dict[int, ChildProcess] = {}
        self._num_started = 0
        self._has_forked = False
        self._returncode: int | None = None
        self._channel, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs, signals_held():  # an event loop's own way to start processes would let them through
            self._process = subprocess.Popen(  # noqa: S603  a command of our own making
                [sys.executable, "-P", "-c", f"from {_PROGRAM} import main; main()", module],
                stdin=theirs.fileno(),
                stderr=child_stderr(),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._thread = Thread(target=self._listen, name=f"fork server of {module}", daemon=True)
        self._thread.start()

    def start(self, config: object, descriptors: Sequence[int] = ()) -> "ChildProcess":
        """Start a process, which reads `config` with `loong.child.config_of`.

        It gets copies of `descriptors`, whose numbers are its arguments.
        """
        self._num_started += 1
        number = self._num_started
        reading, writing = os.pipe()
        process = ChildProcess(lambda which: self._send(f"signal {number} {which:d}"))
        with self._lock:
            self._running[number] = process
            if self._returncode is not None:
                process.end(self._returncode)
        stderr = child_stderr()
        sent = (reading, STDERR if stderr is None else stderr, *descriptors)
        self._send(f"fork {number}", sent)
        os.close(reading)
        process.write(config, writing)
        return process

    @property
    def has_ended(self) -> bool:
        """Return whether it can start no process any more."""
        return self._returncode is not None

    def kill(self, processes: Iterable["ChildProcess"]) -> None:
        """End some of its processes at once, and itself if it has forked none: imports take seconds."""
        for process in processes:
            process.kill()
        if not self._has_forked:
            self._process.kill()

    def close(self) -> None:
        """End it. Processes that still run end by themselves, unseen."""
        self._process.kill()
        self._thread.join()
        self._channel.close()

    def _send(self, message: str, descriptors: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # it has ended, which `_listen` reports
            send_fds(self._channel, [message.encode()], descriptors)

    def _listen(self) -> None:
        while answer := self._received():
            word, number, value = answer.split()
            process = self._running[int(number)]
            if word == "started":
                self._has_forked, process.pid = True, int(value)
            else:
                del self._running[int(number)]
                process.end(int(value))
        with self._lock:
            self._returncode = self._process.wait()
            for process in self._running.values():  # their standard input is closed then, which ends them
                process.end(self._returncode)

    def _received(self) -> str:
        try:
            return self._channel.recv(MAX_MESSAGE_BYTES).decode()
        except ConnectionError:
            return ""


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

    def write(self, config: object, stdin: int) -> None:
        """Write its configuration, in a thread, and close its standard input once it has ended."""
        Thread(target=self._write, args=(config_line(config), stdin), daemon=True).start()

    def end(self, code: int) -> None:
        """Pass its exit code to those that wait for it."""
        self._has_ended.set()
        _running.discard(self)
        with suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            self._loop.call_soon_threadsafe(self._end, code)

    def _write(self, config: bytes, stdin: int) -> None:
        with suppress(BrokenPipeError), open(stdin, "wb") as pipe:
            pipe.write(config)
            pipe.flush()
            self._has_ended.wait()

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
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


async def stop(process: ChildProcess) -> None:
    """Wait for a process that was asked to end, and kill it if it does not."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        logger.warning("process %s did not end within %.0f s; killing it", process.pid, _STOP_SECONDS)
        process.kill()
        await process.wait()
