"""The processes that compile grammars and find the tokens that they allow, for one worker.

One of them finds tokens. Its *spare* is a copy of it from a moment ago, which takes its place if it ends.
Each new grammar is compiled in another copy. Once it is compiled, that copy and a spare of it replace both.
The *root* has compiled nothing, and serves if all others end.
"""

import logging
import os
import signal
from collections import deque
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from loong.core.errors import ClusterError
from loong.core.grammar import Grammar
from loong.core.request import RequestId, TokenId
from loong.grammar.connection import Connection
from loong.grammar.mask_process import (
    MAX_COMPILE_SECONDS,
    MAX_EXTRA_MEMORY,
    MAX_ROWS,
    Compiled,
    CompileGrammar,
    Copied,
    CopyProcess,
    Filled,
    FillMasks,
    Message,
    SharedMasks,
)
from loong.grammar.matchers import MaskRow

logger = logging.getLogger(__name__)

MAX_MATCHERS = 1024  # of each process
_REPEAT_SECONDS_PER_TOKEN = 0.001  # for tokens of an output that a process has yet to see
_MAX_SPARE_SECONDS = 1.0  # of work since the spare was copied, which it would have to repeat
_HUNG_SECONDS = 30.0  # for one row, by the clock: the process is stopped, or waits for memory
_EARLY = 0.9  # the kernel may see the end of a time limit a little before
_MAX_ENDS = 4  # in a row, without a request that could be the cause

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class AskedMask:
    """A request whose next tokens are to be found after its output, and the number of its grammar.

    It may take `seconds` of the processor's time, and more if several of its tokens are new to the process.
    """

    request_id: RequestId
    number: int
    output_token_ids: Sequence[TokenId]
    stop_token_ids: Sequence[TokenId]
    seconds: float


class FoundMask(NamedTuple):
    """The tokens that may follow, a bit each, [V / 32] int32; None if they ended the process.

    `seconds` are those of the processor. After an error, no token may follow.
    """

    words: Tensor | None
    seconds: float = 0.0
    error: str | None = None


class _Progress(NamedTuple):
    """The progress of an output in a grammar, by its number."""

    number: int
    num_tokens: int


class _MaskProcess:
    """One of these processes. Its methods raise EOFError once it has ended."""

    def __init__(self, connection: Connection, before: "_MaskProcess | None" = None) -> None:
        """Take a process that has compiled nothing, or a copy of the one `before`."""
        self._connection = connection
        self._descriptor: int | None = None  # of the process; its id may be another's once it has ended
        self.numbers: set[int] = set() if before is None else {*before.numbers}  # of its grammars
        self.progress: dict[RequestId, _Progress] = {} if before is None else {**before.progress}
        self._held: set[RequestId] = set() if before is None else {*before._held}  # its matchers

    def copy(self) -> "_MaskProcess":
        """Return a copy, which it forks now."""
        ours, theirs = Connection.pair()
        copy = _MaskProcess(ours, self)
        try:
            self._send(CopyProcess(), theirs)
            copy._descriptor = os.pidfd_open(self._receive(Copied, _HUNG_SECONDS).pid)
        except (EOFError, TimeoutError, ProcessLookupError) as error:
            copy.close()
            raise EOFError from error
        finally:
            theirs.close()
        return copy

    def compile(self, number: int, grammar: Grammar) -> Compiled:
        """Compile a grammar. Raises TimeoutError if it hangs."""
        self._send(CompileGrammar(number, grammar))
        compiled = self._receive(Compiled, 2 * MAX_COMPILE_SECONDS)
        if compiled.error is None:
            self.numbers.add(number)
        return compiled

    def forget(self, request_id: RequestId) -> None:
        """Begin anew with a request."""
        self.progress.pop(request_id, None)

    def keep(self, numbers: Set[int]) -> None:
        """Forget all other grammars, and the requests that have one of them."""
        self.progress = {i: its for i, its in self.progress.items() if its.number in numbers}

    def fill(self, asked: Sequence[AskedMask], numbers: Set[int], shared: SharedMasks) -> Filled:
        """Fill the shared masks. It forgets grammars besides `numbers`, and requests without progress.

        Raises TimeoutError if it hangs.
        """
        shared.clear()
        self.keep(numbers)
        rows = tuple(map(self._row, asked))
        forgotten = self._held - self.progress.keys()
        self._send(FillMasks(rows, tuple(forgotten), tuple(self.numbers - numbers)))
        self._held -= forgotten
        self.numbers &= numbers
        filled = self._filled(shared)
        for index, item in enumerate(asked):
            self.forget(item.request_id)  # the latest come last
            if index not in filled.errors:
                self._held.add(item.request_id)
                self.progress[item.request_id] = _Progress(item.number, len(item.output_token_ids))
        while len(self.progress) > MAX_MATCHERS:
            self.forget(next(iter(self.progress)))
        return filled

    def _filled(self, shared: SharedMasks) -> Filled:
        while True:
            try:
                return self._receive(Filled, _HUNG_SECONDS)
            except TimeoutError:
                if shared.begun is None or shared.begun[1] > _HUNG_SECONDS:
                    raise

    def close(self) -> None:
        """Let it end once it is done with its message."""
        self._connection.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def kill(self) -> None:
        """End it at once."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.close()

    def _row(self, item: AskedMask) -> MaskRow:
        _, start = self.progress.get(item.request_id, (0, 0))
        if start > len(item.output_token_ids):
            start = 0
        token_ids = tuple(item.output_token_ids[start:])
        seconds = item.seconds + _REPEAT_SECONDS_PER_TOKEN * max(0, len(token_ids) - 1)
        return MaskRow(item.request_id, item.number, start, token_ids, tuple(item.stop_token_ids), seconds)

    def _send(self, message: Message, carried: Connection | None = None) -> None:
        self._connection.send(msgspec.msgpack.encode(message), carried)

    def _receive(self, kind: type[Answer], seconds: float) -> Answer:
        encoded, _ = self._connection.receive(seconds)
        return msgspec.msgpack.decode(encoded, type=kind)


class MaskProcesses:
    """All of these processes. One thread may compile while another finds tokens, and any may forget.

    A method raises `ClusterError` if no process is left.
    """

    def __init__(self, root: Connection, shared: SharedMasks) -> None:
        """Take the result of `fork_mask_process`, and the memory that it was given."""
        self._root, self._shared = _MaskProcess(root), shared
        self._forgotten: deque[RequestId] = deque()
        self._turn = Lock()  # guards all below
        self._serving: _MaskProcess | None = None
        self._spare: _MaskProcess | None = None
        self._compiling: _MaskProcess | None = None
        self._num_ends = 0  # of processes in a row that no request was the cause of
        self._suspect: RequestId | None = None  # the request at which the last of these ended
        self._num_seconds = 0.0  # of work since the spare was copied

    def compile(self, number: int, grammar: Grammar) -> int:
        """Compile a grammar under a new number, and return its size in bytes.

        Raises ValueError if it cannot be compiled.
        """
        with self._turn:
            copy = self._compiling = self._copy()
        try:
            compiled = copy.compile(number, grammar)
            if compiled.error is not None:
                raise ValueError(compiled.error)
            with self._turn:
                self._replace(copy)
        except (EOFError, TimeoutError):
            limits = f"{MAX_COMPILE_SECONDS:g} s or {MAX_EXTRA_MEMORY >> 20} MiB"
            raise ValueError(f"its process ended, which may take {limits}") from None
        finally:
            self._compiling = None
            if copy is not self._serving:
                copy.kill()
        return compiled.num_bytes

    def has(self, number: int) -> bool:
        """Return whether a grammar is there. It is not if all processes that had it have ended."""
        with self._turn:
            return number in self._process().numbers

    def fill(self, asked: Sequence[AskedMask], numbers: Set[int]) -> list[FoundMask]:
        """Return the masks of the first requests, as many as could be found, perhaps none.

        Only the grammars with these numbers are kept. All that the requests need are there.
        """
        with self._turn:
            asked, process = asked[:MAX_ROWS], self._process()
            self._forget()
            try:
                filled = process.fill(asked, numbers, self._shared)
            except (EOFError, TimeoutError):
                return self._found_before_the_end(asked)
            self._num_ends = 0
            found = [
                FoundMask(words, seconds, filled.errors.get(index))
                for index, (words, seconds) in enumerate(
                    zip(self._words(len(asked)), filled.seconds, strict=True)
                )
            ]
            self._num_seconds += sum(filled.seconds)
            if self._num_seconds > _MAX_SPARE_SECONDS:
                with suppress(EOFError):  # noticed when it is needed
                    self._replace(process)
            return found

    def forget(self, request_id: RequestId) -> None:
        """Begin anew with a request; from any thread."""
        self._forgotten.append(request_id)

    def close(self) -> None:
        """Let all processes end."""
        for process in (self._root, self._serving, self._spare, self._compiling):
            if process is not None:
                process.close()

    def _process(self) -> _MaskProcess:
        """Return the process that finds tokens."""
        while self._serving is None:
            try:
                self._serving = self._root.copy()
            except EOFError:
                raise ClusterError("the process that finds the tokens of grammars has ended") from None
        return self._serving

    def _copy(self) -> _MaskProcess:
        while True:
            try:
                return self._process().copy()
            except EOFError:
                self._fall_back()

    def _replace(self, process: _MaskProcess) -> None:
        """Let a process find tokens from now on, with a new spare. Raises EOFError if it has ended."""
        spare = process.copy()
        for former in (self._serving, self._spare):
            if former is not None and former is not process:
                former.close()
        self._serving, self._spare, self._num_seconds = process, spare, 0.0

    def _fall_back(self) -> None:
        """Let the spare take the place of the process that finds tokens, which has ended or hangs."""
        self._num_ends += 1
        if self._num_ends > _MAX_ENDS:
            raise ClusterError(f"{self._num_ends} processes that find the tokens of grammars ended in a row")
        if self._serving is not None:
            self._serving.kill()
        self._serving, self._spare = self._spare, None
        if self._serving is not None:
            with suppress(EOFError):  # noticed when it is needed
                self._replace(self._serving)

    def _found_before_the_end(self, asked: Sequence[AskedMask]) -> list[FoundMask]:
        """Return the masks found by the process that has ended. It may have ended at one of the requests.

        One that took up its time was the cause, and so was one at which another process ended before.
        """
        begun = self._shared.begun
        self._fall_back()
        if begun is None:
            return []
        index, seconds = begun
        found = [FoundMask(words) for words in self._words(min(index, len(asked)))]
        if index < len(asked):
            item = asked[index]
            if seconds >= _EARLY * item.seconds or self._suspect == item.request_id:
                self._num_ends = 0
                found.append(FoundMask(None))
            self._suspect = item.request_id
        return found

    def _forget(self) -> None:
        while self._forgotten:
            request_id = self._forgotten.popleft()
            for process in (self._serving, self._spare, self._compiling):
                if process is not None:
                    process.forget(request_id)

    def _words(self, num_rows: int) -> Sequence[Tensor]:
        return torch.from_numpy(self._shared.masks[:num_rows].copy()).unbind()
