"""Trial compilation of grammars before a request is queued, bounded in time and memory."""

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

import msgspec

from loong.core.errors import ClusterError, LoongError
from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.availability import ARE_REFUSED
from loong.server.api.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 2**16
MAX_SECONDS = 2.0  # for one grammar; every worker needs the same time
_START_SECONDS = 60.0
_MAX_PENDING = 64
MAX_KNOWN = 1024
_CODES = dict.fromkeys((GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG), "invalid_schema")
_PROCESS = """\
from loong.child import leave_signals_to_parent
leave_signals_to_parent()  # before what takes a while to import
from loong.grammar.check_process import main
main()"""


class _NoGrammarsError(LoongError):
    """No grammar can be compiled in this process."""


class GrammarChecker:
    """Checks whether workers can compile grammars. Its process starts at the first use."""

    def __init__(self, folder: Path | None, vocab_size: int, max_seconds: float = MAX_SECONDS) -> None:
        """Set up. `folder` has the model's tokenizer; with None, no grammar can be compiled."""
        self._folder, self._vocab_size, self.max_seconds = folder, vocab_size, max_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._why_unusable = ""  # reason why no grammar can be compiled
        self._turn = asyncio.Lock()
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
        except _NoGrammarsError as error:
            raise _refusal(field, str(error), "unsupported_parameter") from error
        if why:
            raise _refusal(field, why, _CODES.get(grammar.kind, "invalid_grammar"))

    async def close(self) -> None:
        """End the process, and all waiting checks."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        await self._stop()

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
        async with self._turn:
            try:
                return await self._ask(source)
            except TimeoutError:
                await self._stop()
                self._checks.pop(digest, None)  # a later check may be faster
                return f"the grammar takes more than {self.max_seconds:g} s to compile and try"

    async def _ask(self, source: bytes) -> str:
        is_new = self._process is None
        process = self._process or await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(source + b"\n")
            return await self._answer(process, self.max_seconds)
        except (ConnectionError, msgspec.DecodeError):  # it ended
            await self._stop()
            if not is_new:  # perhaps before this check
                return await self._ask(source)
            return "the grammar takes too much memory"

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the process. Raises `_NoGrammarsError` if it can compile no grammars."""
        if self._why_unusable:
            raise _NoGrammarsError(self._why_unusable)
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _PROCESS, str(self._folder), str(self._vocab_size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._why_unusable = await self._answer(process, _START_SECONDS)
        except TimeoutError as error:
            await self._stop()
            message = f"the process that checks grammars did not start within {_START_SECONDS:g} s"
            raise ClusterError(message) from error
        except msgspec.DecodeError as error:  # it ended, perhaps by a crash of xgrammar's library
            await self._stop()
            why = f"the process that checks grammars ended with code {process.returncode} at its start"
            raise _NoGrammarsError(why) from error
        if self._why_unusable:
            logger.warning("%s: %s", ARE_REFUSED, self._why_unusable)
            await self._stop()
            raise _NoGrammarsError(self._why_unusable)
        return process

    async def _answer(self, process: asyncio.subprocess.Process, seconds: float) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(seconds):
            return msgspec.json.decode(await process.stdout.readline(), type=str)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _refusal(field: str, why: str, code: str = "invalid_value") -> ApiError:
    return bad_request(f"{field}: {why}", field, code)
