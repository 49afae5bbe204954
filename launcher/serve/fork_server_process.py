"""The fork server: a process that has imported a module, whose `main` each process that it forks runs.

What takes long to import is imported once, and most of its memory is shared by all of them. The fork server
has one thread and never computes, so nothing is half done in a process that begins.
"""

import gc
import os
import signal
import socket
import sys
from importlib import import_module
from select import POLLIN, poll

from loong.child import leave_signals_to_parent

CHANNEL = 0  # the descriptor where the fork server is asked
MAX_MESSAGE_BYTES = 64
MAX_DESCRIPTORS = 8


def main() -> None:
    """Fork a process for each request of the channel; the argument names the module.

    A request is `fork N`, with the descriptors that become standard input, standard error and the others, or
    `signal N NUMBER`. Answers are `started N PID` and `ended N CODE`. Ends when the channel is closed.
    """
    leave_signals_to_parent()
    with socket.socket(fileno=os.dup(CHANNEL)) as channel:
        os.dup2(os.open(os.devnull, os.O_RDWR), CHANNEL)
        module = import_module(sys.argv.pop())
        gc.collect()
        gc.freeze()  # a collection would write to pages that are shared
        _Server(channel).serve()
    module.main()


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wakeups = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pids: dict[str, int] = {}  # of those that run, by number

    def serve(self) -> None:
        """Answer requests until the channel is closed. Returns in each process that is forked, at once."""
        receiving, sending = self._wakeups
        signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ready = poll()
        ready.register(self._channel, POLLIN)
        ready.register(receiving, POLLIN)
        while True:
            found = [descriptor for descriptor, _ in ready.poll()]
            if receiving in found:
                os.read(receiving, MAX_MESSAGE_BYTES)
                self._reap()
            if self._channel.fileno() in found and self._is_child_after_request():
                return

    def _is_child_after_request(self) -> bool:
        message, descriptors = self._received()
        match message.decode().split():
            case ["fork", number]:
                if (pid := os.fork()) == 0:
                    self._begin(descriptors)
                    return True
                for descriptor in descriptors:
                    os.close(descriptor)
                self._pids[number] = pid
                self._answer(f"started {number} {pid}")
            case ["signal", number, which]:
                if number in self._pids:
                    os.kill(self._pids[number], int(which))
            case _:  # closed
                os._exit(0)
        return False

    def _received(self) -> tuple[bytes, list[int]]:
        try:
            message, descriptors, *_ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionError:  # closed before all answers were read
            return b"", []
        return message, descriptors

    def _begin(self, descriptors: list[int]) -> None:
        """Make a process of its own of this one."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in self._wakeups:
            os.close(descriptor)
        stdin, stderr, *others = descriptors
        for descriptor, standard in ((stdin, 0), (stderr, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.argv[1:] = map(str, others)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                self._answer(f"ended {number} {os.waitstatus_to_exitcode(status)}")

    def _answer(self, message: str) -> None:
        try:
            self._channel.send(message.encode())
        except ConnectionError:  # closed; the next request says so
            return
