"""A process that compiles grammars and finds the tokens that they allow, for one worker.

Grammars come from clients, and xgrammar's calls cannot be interrupted. So the kernel ends the process if a
call takes too much of the processor's time. A copy of the process, forked before, goes on without the
request that took too long.

It has one thread, which answers one message after another until its connection is closed. So it can be
forked at any moment between two messages.
"""

import ctypes
import gc
import mmap
import os
import resource
import signal
import traceback
from pathlib import Path
from socket import socket
from time import monotonic, process_time
from typing import Never, TypeAlias, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from loong.core.grammar import Grammar
from loong.grammar.connection import Connection
from loong.grammar.matchers import MaskRow, Matchers

MAX_ROWS = 256  # of one message
MAX_COMPILE_SECONDS = 30.0  # of the processor's time
MAX_EXTRA_MEMORY = 3 << 29  # bytes that it may take in addition to those that it begins with
_BITS = 32  # of a word of a mask
_NAME = b"loong-grammars"  # as `ps -e` and `top` show it
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # of prctl
_CONNECTION = 3  # its only descriptor besides the standard ones


class CopyProcess(msgspec.Struct, tag=True, frozen=True):
    """Asks for a copy of the process, which serves the connection that comes with this message."""


class CompileGrammar(msgspec.Struct, tag=True, frozen=True):
    """Asks for a grammar to be compiled, under a new number."""

    number: int
    grammar: Grammar


class FillMasks(msgspec.Struct, tag=True, frozen=True):
    """Asks for the next tokens of some requests. It may forget some of the others, and grammars, before."""

    rows: tuple[MaskRow, ...]
    forgotten: tuple[str, ...]
    forgotten_numbers: tuple[int, ...]


Message: TypeAlias = CopyProcess | CompileGrammar | FillMasks


class Copied(msgspec.Struct, frozen=True):
    """The id of the copy."""

    pid: int


class Compiled(msgspec.Struct, frozen=True):
    """The size of the compiled grammar, or the error."""

    num_bytes: int
    error: str | None = None


class Filled(msgspec.Struct, frozen=True):
    """The processor's seconds that each row took, and the errors of rows that have no mask, by index."""

    seconds: tuple[float, ...]
    errors: dict[int, str]


class SharedMasks:
    """Memory that a worker shares with all of these processes: the masks of one message, and its progress."""

    def __init__(self, vocab_size: int) -> None:
        num_words = -(-vocab_size // _BITS)
        memory = mmap.mmap(-1, mmap.PAGESIZE + 4 * MAX_ROWS * num_words)
        self._progress = np.frombuffer(memory, np.float64, 2)
        words = np.frombuffer(memory, np.int32, MAX_ROWS * num_words, mmap.PAGESIZE)
        self.masks: NDArray[np.int32] = words.reshape(MAX_ROWS, num_words)
        self.clear()

    def clear(self) -> None:
        """Forget which row was begun last."""
        self._progress[0] = -1

    def begin(self, index: int) -> None:
        """Note that a row begins now."""
        self._progress[:] = index, monotonic()

    @property
    def begun(self) -> tuple[int, float] | None:
        """The row that was begun last, and the seconds since; None if there is none."""
        index, begun_at = self._progress
        return None if index < 0 else (int(index), monotonic() - float(begun_at))


def fork_mask_process(folder: Path, vocab_size: int, shared: SharedMasks) -> Connection:
    """Fork a process that has compiled nothing yet, and return the connection to it.

    Call it while this process has one thread. `folder` has the tokenizer's tokenizer.json.
    """
    ours, theirs = Connection.pair()
    if os.fork():
        theirs.close()
        return ours
    try:
        _serve(_begun(theirs), Matchers(folder, vocab_size), shared)
    except BaseException:  # noqa: BLE001  nothing of the process that it was forked from may run here
        traceback.print_exc()
    os._exit(1)


def _begun(connection: Connection) -> Connection:
    """Make a process of its own of this one, which has only this connection open."""
    os.dup2(connection.socket.detach(), _CONNECTION)
    os.closerange(_CONNECTION + 1, os.sysconf("SC_OPEN_MAX"))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_NAME, _NAME)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)  # the kernel then removes copies of copies too, since
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for any
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.freeze()  # a collection would write to pages that are shared
    return Connection(socket(fileno=_CONNECTION))


def _serve(connection: Connection, matchers: Matchers, shared: SharedMasks) -> Never:
    while True:
        try:
            encoded, carried = connection.receive()
        except EOFError:
            os._exit(0)
        match message := msgspec.msgpack.decode(encoded, type=Message):
            case CopyProcess():
                assert carried is not None, "a copy has a connection of its own"
                if (pid := os.fork()) == 0:
                    connection.close()
                    connection = carried
                    continue
                carried.close()
                answer: Copied | Compiled | Filled = Copied(pid)
            case CompileGrammar():
                answer = _compiled(message, matchers)
            case FillMasks():
                answer = _filled(message, matchers, shared)
            case _:
                assert_never(message)
        connection.send(msgspec.msgpack.encode(answer))


def _compiled(message: CompileGrammar, matchers: Matchers) -> Compiled:
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)  # nothing handles it, so it ends the process
    try:
        return Compiled(matchers.compile(message.number, message.grammar))
    except Exception as error:  # noqa: BLE001  xgrammar's import, and tokenizers, may raise anything
        return Compiled(0, f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _filled(message: FillMasks, matchers: Matchers, shared: SharedMasks) -> Filled:
    matchers.forget(message.forgotten, message.forgotten_numbers)
    seconds, errors = [], {}
    for index, row in enumerate(message.rows):
        shared.begin(index)
        begun_at = process_time()
        signal.setitimer(signal.ITIMER_PROF, row.seconds)
        try:
            matchers.fill(row, shared.masks, index)
        except (RuntimeError, ValueError, MemoryError) as error:
            matchers.forget([row.request_id], ())
            errors[index] = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds.append(process_time() - begun_at)
    shared.begin(len(message.rows))
    return Filled(tuple(seconds), errors)
