"""A fork server, as the process that starts others by it sees it.

The processes that it forks are children of this one. They go on if the fork server dies, and another takes
its place.
"""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from threading import Event, Lock, Thread

from loong.processes.child import config_line, signals_held
from loong.processes.child_processes import FORK_SERVER_LOST, ChildProcess, how_it_ended
from loong.processes.fork_server_process import MAX_MESSAGE_BYTES
from loong.processes.logs import child_stderr

logger = logging.getLogger(__name__)

STDERR = 2
_PROGRAM = "loong.processes.fork_server_process"
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class ForkServer:
    """A process that has imported a module, and forks others that run its `main`."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Start it with the variables of this process and those of `environment`, which all others get."""
        self._module, self._environment = module, environment
        self._lock = Lock()
        self._numbers = count(1)
        self._running = set[_Forked]()
        self._is_closed = False
        self._server = self._begun()

    def start(self, config: object, descriptors: Sequence[int] = ()) -> ChildProcess:
        """Start a process, which reads `config` with `loong.processes.child.config_of`.

        It gets copies of `descriptors`, whose numbers are its arguments.
        """
        reading, writing = os.pipe()
        forked = _Forked(config, writing)
        with self._lock:
            self._running = {other for other in self._running if not other.has_ended} | {forked}
            if self._server.has_ended:
                self._server = self._begun()
            number, server = next(self._numbers), self._server
            server.pending[number] = forked
            _adoption.begin()
        stderr = child_stderr()
        with suppress(ConnectionError):  # it has ended, which its thread handles
            sent = (reading, STDERR if stderr is None else stderr, *descriptors)
            send_fds(server.channel, [b"%d" % number], sent)
        os.close(reading)
        return forked.process

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """End some of its processes at once, and itself if it has forked none: imports take seconds."""
        for process in processes:
            process.kill()
        if not self._server.has_forked:
            self._server.process.kill()

    def close(self) -> None:
        """End it. Processes that still run end by themselves."""
        with self._lock:
            self._is_closed = True
            server = self._server
        server.process.kill()
        server.thread.join()
        for forked in self._running:
            forked.close_stdin()

    def _begun(self) -> "_Server":
        channel, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs, signals_held():  # an event loop's own way to start processes would let them through
            process = subprocess.Popen(  # noqa: S603  a command of our own making
                [sys.executable, "-P", "-c", f"from {_PROGRAM} import main; main()", self._module],
                stdin=theirs.fileno(),
                stderr=child_stderr(),
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        server = _Server(process, channel)
        server.thread = Thread(target=self._follow, args=(server,), name="fork server", daemon=True)
        server.thread.start()
        return server

    def _follow(self, server: "_Server") -> None:
        """Pass on what a fork server answers. When it ends, let another take its place."""
        with server.channel:
            while answer := _received(server.channel):
                number, pid = map(int, answer.split())
                with self._lock:
                    forked = server.pending.pop(number)
                server.has_forked = True
                forked.begin(pid)
                _adoption.end()
            code = server.process.wait()
        with self._lock:
            server.has_ended = True
            failed, server.pending = server.pending.values(), {}
            if not self._is_closed:
                self._replace(server, code)
        for forked in failed:
            forked.fail(code if code > 0 else FORK_SERVER_LOST)
            _adoption.end()

    def _replace(self, server: "_Server", code: int) -> None:
        """Begin another, unless this one could not even fork: then the next start does."""
        what = "another takes its place" if server.has_forked else "the next start begins another"
        where = f"the fork server of {self._module}, process {server.process.pid},"
        logger.error("%s %s; what it forked goes on, and %s", where, how_it_ended(code), what)
        if server.has_forked:
            self._server = self._begun()


@dataclass(eq=False, slots=True)
class _Server:
    """One process of a fork server, and the processes that it is to fork, by number."""

    process: "subprocess.Popen[bytes]"
    channel: socket
    pending: "dict[int, _Forked]" = field(default_factory=dict)
    has_forked: bool = False
    has_ended: bool = False
    thread: Thread = field(default_factory=Thread)


def _received(channel: socket) -> bytes:
    try:
        return channel.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return b""


class _Forked:
    """A process from its request to its end. A thread writes its config, and waits for it."""

    def __init__(self, config: object, stdin: int) -> None:
        self.process = ChildProcess(self._send_signal)
        self.has_ended = False
        self._stdin: int | None = stdin  # open until it ends
        self._lock, self._stdin_lock = Lock(), Lock()
        self._early: list[int] = []  # signals that came before it was forked
        self._pid: int | None = None  # while it may be sent signals
        self._code = 0
        self._is_decided = Event()  # whether it is forked
        Thread(target=self._keep, args=(config_line(config),), name="child", daemon=True).start()

    def begin(self, pid: int) -> None:
        """Note that it is forked, as a child of this process."""
        with self._lock:
            self.process.pid = self._pid = pid
            for number in self._early:
                os.kill(pid, number)
        self._is_decided.set()

    def fail(self, code: int) -> None:
        """Note that it is never forked."""
        self._code = code
        self._is_decided.set()

    def close_stdin(self) -> None:
        """Close its standard input, which ends it."""
        with self._stdin_lock:
            if self._stdin is not None:
                os.close(self._stdin)
                self._stdin = None

    def _send_signal(self, number: int) -> None:
        with self._lock:
            if self._pid is not None:
                os.kill(self._pid, number)
            elif not self._is_decided.is_set():
                self._early.append(number)

    def _keep(self, config: bytes) -> None:
        with self._stdin_lock, suppress(BrokenPipeError):
            while self._stdin is not None and config:
                config = config[os.write(self._stdin, config) :]
        self._is_decided.wait()
        if self._pid is not None:
            self._code = self._reaped(self._pid)
        self.has_ended = True
        self.close_stdin()
        self.process.end(self._code)

    def _reaped(self, pid: int) -> int:
        """Wait until it ends. Return its exit code."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # its id is its own until it is reaped
            self._pid = None
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Adoption:
    """Makes this process the parent of the orphans that its children leave, while it awaits some."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_awaited = 0

    def begin(self) -> None:
        """Await one more."""
        self._add(1)

    def end(self) -> None:
        """Await one less."""
        self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            self._num_awaited += change
            if ctypes.CDLL(None, use_errno=True).prctl(
                _PR_SET_CHILD_SUBREAPER, self._num_awaited > 0, 0, 0, 0
            ):
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


_adoption = _Adoption()  # a property of the process
