"""Commands of `loong` that start at once: their processes are forked from one that has imported all.

A new Python imports for seconds, and so do the fork servers that a new server starts. Here all are forked,
and are else what they are for users: processes in sessions of their own, fork servers children of the
server. What is tested of a start itself needs a new Python.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from threading import Lock
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import values

from loong.processes import fork_server, fork_server_process
from loong.processes.child import STOP_SIGNALS, config_line, config_of, name_process
from loong.worker.config import ENVIRONMENT

NAME = "loong-warm"  # of a process that forks fork servers for another
_PROGRAM = "from loong.processes.fork_server_process import main; main()"
_PRELOADED = (
    "loong.launcher.cli",
    "loong.launcher.serve.api_process",
    "loong.launcher.serve.command",
    "loong.launcher.serve.config",
    "loong.launcher.serve.serving",
    "loong.worker.process",
    *(
        ["xgrammar"] if find_spec("xgrammar") else []
    ),  # which processes of workers import at their first grammar
)
_POLL_SECONDS = 0.01
_MAX_DESCRIPTORS = 1024
_asking = Lock()


class _Command(msgspec.Struct, frozen=True):
    """A Python program with arguments and variables, in a folder; None: a fork server, in any."""

    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str | None


class ForkedProcess:
    """A child of this process that it did not start by itself; used as a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a warm command", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def start_command(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    outputs: tuple[int, int],
) -> ForkedProcess:
    """Start a program that reads nothing, and writes to two descriptors."""
    command = _Command(program, arguments, environment, str(folder))
    with Path(os.devnull).open("rb") as nothing:
        return _started(_warm_process(), command, nothing.fileno(), *outputs)


@contextmanager
def warm_fork_servers() -> Iterator[None]:
    """Let the fork servers that this process starts inside the context be warm."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(fork_server, "subprocess", SimpleNamespace(Popen=_Starter(_warm_process())))
        yield


@cache
def _warm_process() -> socket:
    """Start the process that the others are forked from; return the channel where it is asked."""
    channel, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    imports = "".join(f"import {module}; " for module in _PRELOADED)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", imports + _PROGRAM, __name__],
            stdin=theirs.fileno(),
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
            start_new_session=True,
        )

    def end() -> None:
        channel.close()
        process.wait()

    atexit.register(end)
    return channel


def _started(channel: socket, command: _Command, stdin: int, stdout: int, stderr: int) -> ForkedProcess:
    """Ask for a process, which becomes a child of this one."""
    reading, writing = os.pipe()
    fork_server._adoption.begin()
    try:
        with _asking:  # two threads would read each other's answer
            send_fds(channel, [b"1"], (reading, stderr, stdin, stdout))
            _, pid = channel.recv(fork_server_process.MAX_MESSAGE_BYTES).split()
    finally:
        fork_server._adoption.end()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(config_line(command))
    return ForkedProcess(int(pid))


class _Starter:
    """Starts fork servers as `subprocess.Popen` does."""

    def __init__(self, channel: socket) -> None:
        self._channel = channel

    def __call__(
        self, command: Sequence[str], *, stdin: int, stderr: int | None, env: Mapping[str, str], **_: bool
    ) -> ForkedProcess:
        program, module = command[-2:]
        forked = _Command(program, (module,), env, None)
        return _started(self._channel, forked, stdin, 1, 2 if stderr is None else stderr)


def main() -> None:
    """Run the command that standard input names, as a new Python would."""
    with os.fdopen(0, "rb", closefd=False) as pipe:
        command = config_of(pipe.readline(), _Command)
    for descriptor, standard in zip(map(int, sys.argv[1:]), (0, 1), strict=True):
        os.dup2(descriptor, standard)
    os.closerange(3, _MAX_DESCRIPTORS)
    os.environ.clear()
    os.environ |= command.environment
    tempfile.tempdir = None  # these two were chosen by variables when modules were imported
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]  # it has no types
    if command.folder is not None:
        os.chdir(command.folder)
        if (channel := _own_warm_process()) is None:
            main()
            return
        setattr(fork_server, "subprocess", SimpleNamespace(Popen=_Starter(channel)))  # noqa: B010
        _heed_signals()
    sys.argv = ["-c", *command.arguments]
    exec(compile(command.program, "<string>", "exec"), {"__name__": "__main__"})


def _own_warm_process() -> socket | None:
    """Fork a process that forks fork servers for this one. Return None in each of these."""
    channel, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return channel
    name_process(NAME)
    channel.close()
    with closing(theirs):
        fork_server_process._serve(theirs)
    return None


def _heed_signals() -> None:
    name_process("loong")
    for number in (*STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
