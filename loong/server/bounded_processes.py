"""Processes that answer requests within bounds of time and memory, and are replaced when they do not."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process

from loong.core.errors import ClusterError, LoongError
from loong.processes.bounded_process import NUM_LENGTH_BYTES, message

_START_SECONDS = 60.0
_END_SECONDS = 10.0
_BUFFER_BYTES = 2**20
_PROGRAM = """\
from loong.processes.child import leave_signals_to_parent
leave_signals_to_parent()  # before what takes a while to import
from {module} import main
main()"""


class UnusableProcessError(LoongError):
    """The processes can answer no request, for the reason in the message."""


class ProcessEndedError(LoongError):
    """A process ended while it answered a request, most likely because it needed too much memory."""


class BoundedProcesses:
    """Up to `most` processes that answer requests, one each at a time. They start at need."""

    def __init__(self, module: str, *arguments: str, most: int = 1) -> None:
        """Set up processes that run the `main` of a module, which calls `answer_requests`."""
        self._command = (sys.executable, "-P", "-c", _PROGRAM.format(module=module), *arguments)
        self._module = module
        self._places = asyncio.Semaphore(most)  # first come, first served
        self._idle: list[_BoundedProcess] = []
        self._exchanges: set[asyncio.Task[bytes]] = set()
        self._why_unusable = ""

    async def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the answer to a request.

        Raises TimeoutError if a process does not answer it within `seconds`, and `ProcessEndedError` if a new
        process ends instead. Both cost no other request. Raises `UnusableProcessError` if processes end at
        their start, and `ClusterError` if none starts.
        """
        await self._places.acquire()
        exchange = asyncio.create_task(self._exchange(request, seconds))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._end_exchange)
        return await asyncio.shield(exchange)  # if the client leaves, the process stays usable

    async def start_ahead(self) -> None:
        """Start a process unless one is there, so that the next request need not wait for that.

        Raises the errors of starts that `ask` does.
        """
        async with self._places:
            if not self._idle:
                self._idle.append(await self._start())

    async def close(self) -> None:
        """End all processes and exchanges."""
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()

    def _end_exchange(self, exchange: asyncio.Task[bytes]) -> None:
        self._exchanges.discard(exchange)
        self._places.release()
        if not exchange.cancelled():
            exchange.exception()  # nobody awaits it if the client has left

    async def _exchange(self, request: bytes, seconds: float) -> bytes:
        while True:
            is_new = not self._idle
            process = await self._start() if is_new else self._idle.pop()
            try:
                async with asyncio.timeout(seconds):
                    answer = await process.ask(request)
            except (EOFError, ConnectionError) as error:
                await process.kill()
                if is_new:  # else perhaps it ended before this request
                    raise ProcessEndedError(f"a process of {self._module} ended at a request") from error
            except BaseException:
                await process.kill()
                raise
            else:
                self._idle.append(process)
                return answer

    async def _start(self) -> "_BoundedProcess":
        if self._why_unusable:
            raise UnusableProcessError(self._why_unusable)
        process = _BoundedProcess(
            await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_BUFFER_BYTES
            )
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                reported = await process.answer()
        except TimeoutError as error:
            await process.kill()
            why = f"a process of {self._module} was not ready within {_START_SECONDS:g} s"
            raise ClusterError(why) from error
        except EOFError as error:
            code = await process.end()
            why = f"a process of {self._module} ended with code {code} at its start"
            raise UnusableProcessError(why) from error
        except BaseException:
            await process.kill()
            raise
        if reported:
            await process.kill()
            self._why_unusable = reported.decode()
            raise UnusableProcessError(self._why_unusable)
        return process


class _BoundedProcess:
    """One process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    async def ask(self, request: bytes) -> bytes:
        """Return the answer to a request. Raises EOFError or ConnectionError if the process ends."""
        self._stdin.write(message(request))
        await self._stdin.drain()
        return await self.answer()

    async def answer(self) -> bytes:
        """Return the next answer. Raises EOFError if the process ends."""
        length = await self._stdout.readexactly(NUM_LENGTH_BYTES)
        return await self._stdout.readexactly(int.from_bytes(length))

    async def end(self) -> int:
        """Wait until a process that closed its answers ends, and return its exit code.

        It is not killed before: to signal an ended process is to take its exit code from who waits for it.
        """
        try:
            async with asyncio.timeout(_END_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """End it at once, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()
