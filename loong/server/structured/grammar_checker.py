"""Trial compilation of grammars before a request is queued, bounded in time and memory."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

import msgspec

from loong.core.errors import ClusterError
from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.availability import ARE_REFUSED, is_installed
from loong.server.api.errors import ApiError, bad_request
from loong.server.bounded_processes import BoundedProcesses, ProcessEndedError, UnusableProcessError

logger = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 2**16
MAX_SECONDS = 2.0  # for one grammar; every worker needs the same time
_MAX_PENDING = 64
MAX_KNOWN = 1024
_CODES = dict.fromkeys((GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG), "invalid_schema")
_PROCESS = "loong.grammar.check_process"


class GrammarChecker:
    """Checks whether workers can compile grammars. Its process starts at the first use, or ahead."""

    def __init__(self, folder: Path | None, vocab_size: int, max_seconds: float = MAX_SECONDS) -> None:
        """Set up. `folder` has the model's tokenizer; with None, no grammar can be compiled."""
        self._folder, self.max_seconds = folder, max_seconds
        self._processes = BoundedProcesses(_PROCESS, str(folder), str(vocab_size))
        self._has_warned = False
        self._starts: set[asyncio.Task[None]] = set()
        self._checks: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()  # error or "" by digest

    async def check(self, grammar: Grammar, field: str) -> None:
        """Raise a 400 that names the field and the reason if the grammar cannot be compiled."""
        if self._folder is None:
            raise _refusal(field, "needs a model folder with a tokenizer.json", "unsupported_parameter")
        source = msgspec.json.encode(grammar)
        if len(source) > MAX_SOURCE_BYTES:
            raise _refusal(
                field, f"the grammar has {len(source)} bytes, but at most {MAX_SOURCE_BYTES} are allowed"
            )
        try:
            why = await asyncio.shield(self._task(source))  # goes on if the client leaves
        except UnusableProcessError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: %s", ARE_REFUSED, error)
            raise _refusal(field, str(error), "unsupported_parameter") from error
        if why:
            raise _refusal(field, why, _CODES.get(grammar.kind, "invalid_grammar"))

    def start_ahead(self) -> None:
        """Begin to start the process, so that the next grammar need not wait for that.

        The first grammar reports why it cannot start.
        """
        if self._folder is not None and is_installed():
            start = asyncio.create_task(self._start())
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    async def close(self) -> None:
        """End the process, and all waiting checks."""
        tasks = (*self._checks.values(), *self._starts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._processes.close()

    async def _start(self) -> None:
        with contextlib.suppress(UnusableProcessError, ClusterError):
            await self._processes.start_ahead()

    def _task(self, source: bytes) -> asyncio.Task[str]:
        digest = sha256(source).digest()  # so that results do not keep the grammars
        task = self._checks.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            if sum(not check.done() for check in self._checks.values()) >= _MAX_PENDING:
                message = f"{_MAX_PENDING} grammars are being checked; come back later"
                raise ApiError(503, message, "queue_full", headers={"Retry-After": "1"})
            task = self._checks[digest] = asyncio.create_task(self._checked(source, digest))
            if len(self._checks) > MAX_KNOWN:
                self._checks.popitem(last=False)
        return task

    async def _checked(self, source: bytes, digest: bytes) -> str:
        try:
            return (await self._processes.ask(source, self.max_seconds)).decode()
        except TimeoutError:
            self._checks.pop(digest, None)  # a later check may be faster
            self.start_ahead()
            return f"the grammar takes more than {self.max_seconds:g} s to compile and try"
        except ProcessEndedError:
            self.start_ahead()
            return "the grammar takes too much memory"


def _refusal(field: str, why: str, code: str = "invalid_value") -> ApiError:
    return bad_request(f"{field}: {why}", field, code)
