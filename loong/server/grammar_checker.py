"""Schemas that answers are to keep to, tried before anything is queued, in bounds of time and memory."""

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

import msgspec

from loong.core.errors import ClusterError
from loong.grammar.availability import ARE_REFUSED
from loong.server.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 2**16
MAX_SECONDS = 2.0  # for one schema, which every worker then takes too
_START_SECONDS = 60.0
_MAX_PENDING = 64
MAX_KNOWN = 1024
_PROCESS = """\
from loong.child import leave_signals_to_parent
leave_signals_to_parent()  # before what takes a while to import
from loong.grammar.check_process import main
main()"""


class SchemaChecker:
    """Tells of schemas whether workers can make grammars of them; its process begins when first needed."""

    def __init__(self, folder: Path | None, vocab_size: int, max_seconds: float = MAX_SECONDS) -> None:
        """Take the folder of the model's tokenizer; None: no schema can be kept to."""
        self._folder, self._vocab_size, self.max_seconds = folder, vocab_size, max_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._why_unusable = ""  # what the process says if it can make no grammar at all
        self._turn = asyncio.Lock()
        self._checks: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()  # why not, or "", by digest

    async def check(self, schema: str) -> None:
        """Raise a 400 that says why answers cannot be held to a schema."""
        if self._folder is None:
            raise _refusal("needs a model folder with a tokenizer.json", "unsupported_parameter")
        written = schema.encode()
        if len(written) > MAX_SCHEMA_BYTES:
            raise _refusal(f"the schema has {len(written)} bytes, and {MAX_SCHEMA_BYTES} are the most")
        if why := await asyncio.shield(self._task(written)):  # a client that leaves does not end it
            raise _refusal(why, "invalid_schema")

    async def close(self) -> None:
        """End the process, and all that wait for it."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        await self._stop()

    def _task(self, schema: bytes) -> asyncio.Task[str]:
        digest = sha256(schema).digest()  # so that what is known of a schema takes no room for it
        task = self._checks.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            if sum(not check.done() for check in self._checks.values()) >= _MAX_PENDING:
                message = f"{_MAX_PENDING} schemas are being checked; come back later"
                raise ApiError(503, message, "queue_full", headers={"Retry-After": "1"})
            task = self._checks[digest] = asyncio.create_task(self._checked(schema, digest))
            if len(self._checks) > MAX_KNOWN:
                self._checks.popitem(last=False)
        return task

    async def _checked(self, schema: bytes, digest: bytes) -> str:
        async with self._turn:
            try:
                return await self._ask(schema)
            except TimeoutError:
                await self._stop()
                self._checks.pop(digest, None)  # at another time it may be quicker
                return f"no grammar could be made of the schema within {self.max_seconds:g} s"

    async def _ask(self, schema: bytes) -> str:
        is_new = self._process is None
        process = self._process or await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(schema.decode()) + b"\n")
            return await self._answer(process, self.max_seconds)
        except (ConnectionError, msgspec.DecodeError):  # it ended
            await self._stop()
            if not is_new:  # perhaps before it was asked
                return await self._ask(schema)
            return "a grammar of the schema takes too much memory"

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the process; raise a 400 if it can make no grammar here, whatever the schema."""
        if self._why_unusable:
            raise _refusal(self._why_unusable, "unsupported_parameter")
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
            message = f"the process that checks schemas did not start within {_START_SECONDS:g} s"
            raise ClusterError(message) from error
        except msgspec.DecodeError as error:  # it ended, perhaps by a crash of xgrammar's library
            await self._stop()
            why = f"the process that checks schemas ended with code {process.returncode} at its start"
            raise _refusal(why, "unsupported_parameter") from error
        if self._why_unusable:
            logger.warning("%s: %s", ARE_REFUSED, self._why_unusable)
            await self._stop()
            raise _refusal(self._why_unusable, "unsupported_parameter")
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


def _refusal(why: str, code: str = "invalid_value") -> ApiError:
    return bad_request(f"response_format: {why}", "response_format", code)
