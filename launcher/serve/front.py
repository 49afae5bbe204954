"""The parts that answer clients: this process (`LocalFrontend`), or API processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import socket
from typing import Protocol

from aiohttp import web

from loong.server.admission import Admission
from loong.server.api.listen import serve, stop_listening
from loong.server.context import SERVER

LAST_WORDS_SECONDS = 2.0  # for streams that are cut off to report it


class Front(Protocol):
    """Answers clients, within the bounds of its admission."""

    @property
    def admission(self) -> Admission:
        """Return the requests in flight and their bounds."""
        ...

    def report_limits(self) -> None:
        """Apply the engine's present limits to all later requests."""
        ...

    async def stop_listening(self) -> None:
        """Refuse new connections; those that are open go on."""
        ...


class LocalFrontend:
    """An application in this process, with its `admission`."""

    def __init__(self, runner: web.AppRunner, admission: Admission) -> None:
        self.admission = admission
        self._runner = runner

    def report_limits(self) -> None:
        """Do nothing, because handlers ask the engine."""

    async def stop_listening(self) -> None:
        """Refuse new connections."""
        await stop_listening(self._runner)


@asynccontextmanager
async def front_here(app: web.Application, admission: Admission, listener: socket) -> AsyncIterator[Front]:
    """Serve an application while the context lasts, and until its last messages are sent."""
    runner = await serve(app, listener, shutdown_timeout=LAST_WORDS_SECONDS)
    app[SERVER].grammars.start_ahead()
    try:
        yield LocalFrontend(runner, admission)
    finally:
        await runner.cleanup()
