"""The fork server: a process that has imported a module, whose `main` each process that it forks runs.

What takes long to import is imported once, and most of its memory is shared by all of them. The fork server
has one thread and never computes, so nothing is half done in a process that begins. What it forks belongs to
the process that asked, and goes on if the fork server is killed.
"""

import gc
import os
import socket
import sys
from importlib import import_module

from loong.processes.child import leave_signals_to_parent, name_process

CHANNEL = 0  # the descriptor where the fork server is asked
MAX_MESSAGE_BYTES = 64
_MAX_DESCRIPTORS = 8


def main() -> None:
    """Fork a process for each request of the channel; the argument names the module.

    A request is a number, with the descriptors that become standard input, standard error and the others.
    Its answer is `N PID`, sent once the process is a child of the one that asked. Ends when the channel is
    closed.
    """
    leave_signals_to_parent()
    name_process("loong-forks")
    with socket.socket(fileno=os.dup(CHANNEL)) as channel:
        os.dup2(os.open(os.devnull, os.O_RDWR), CHANNEL)
        module = import_module(sys.argv.pop())
        gc.collect()
        gc.freeze()  # a collection would write to pages that are shared
        _serve(channel)
    module.main()


def _serve(channel: socket.socket) -> None:
    """Answer requests until the channel is closed. Returns in each process that is forked, at once."""
    while True:
        try:
            message, descriptors, *_ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        except ConnectionError:  # closed before all answers were read
            message = b""
        if not message:
            os._exit(0)
        if (pid := _fork(descriptors)) is None:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            channel.send(b"%s %d" % (message, pid))
        except ConnectionError:  # closed; the next request says so
            continue


def _fork(descriptors: list[int]) -> int | None:
    """Fork an orphan, which the process that asked adopts. Return its process id, or None in the orphan.

    Its parent is a process in between, which ends at once.
    """
    receiving, sending = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork():
            os._exit(0)
        os.close(receiving)
        _begin(descriptors)
        os.write(sending, b"%d" % os.getpid())
        os.close(sending)
        return None
    os.close(sending)
    pid = int(os.read(receiving, MAX_MESSAGE_BYTES))
    os.close(receiving)
    os.waitpid(between, 0)
    return pid


def _begin(descriptors: list[int]) -> None:
    """Make a process of its own of this one."""
    os.setsid()
    name_process("loong-forked")  # until it has a name of its own
    stdin, stderr, *others = descriptors
    for descriptor, standard in ((stdin, 0), (stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    for descriptor in others:  # as all that a process opens, but not what it is sent
        os.set_inheritable(descriptor, False)
    sys.argv[1:] = map(str, others)
