"""The engines behind a server as its handlers see them: their states, and the way to ask one."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from loong.server.api.errors import ApiError

ASK_SECONDS = 5.0  # timeout of a question to an engine
_JSON = {"Content-Type": "application/json"}


class EngineState(StrEnum):
    """An engine serves, is being started for the first time or again, or is not started again."""

    OK = "ok"
    STARTING = "starting"
    RESTARTING = "restarting"
    QUARANTINED = "quarantined"


class Engines(Protocol):
    """The engines of a server, numbered from 0."""

    @property
    def states(self) -> Mapping[int, EngineState]:
        """The states of all engines."""
        ...

    def socket_path(self, engine_id: int) -> Path:
        """Return the path of the socket that serves the state of an engine's cluster."""
        ...

    def kill(self, engine_id: int) -> None:
        """Kill an engine's process at once, as a fault."""
        ...

    def kill_manager(self) -> bool:
        """Kill the gManager of loans at once, as a fault. Return whether there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Page:
    """An engine's answer."""

    status: int
    body: bytes


class EngineSessions:
    """Asks engines over their sockets. A session lasts as long as the server."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._sessions: dict[int, ClientSession] = {}

    @property
    def serving_ids(self) -> Sequence[int]:
        """The engines that serve."""
        return [engine_id for engine_id, state in self._engines.states.items() if state is EngineState.OK]

    def session(self, engine_id: int) -> ClientSession:
        """Return the session with an engine. Raises a 503 if the engine does not serve now."""
        state = self._engines.states[engine_id]
        if state is not EngineState.OK:
            raise ApiError(503, f"engine {engine_id} does not serve now: it is {state}", "engine_not_live")
        if engine_id not in self._sessions:
            connector = UnixConnector(str(self._engines.socket_path(engine_id)), limit=0)
            self._sessions[engine_id] = ClientSession(connector=connector, auto_decompress=False)
        return self._sessions[engine_id]

    async def ask(self, engine_id: int, method: str, path: str, body: bytes | None = None) -> Page | None:
        """Return an engine's answer to a request, whose body is JSON, or None if it gives none in time."""
        timeout, headers = ClientTimeout(total=ASK_SECONDS), {} if body is None else _JSON
        try:
            session = self.session(engine_id)
            async with session.request(
                method, f"http://engine{path}", data=body, headers=headers, timeout=timeout
            ) as answer:
                return Page(answer.status, await answer.read())
        except (ApiError, ClientError, TimeoutError):
            return None

    async def ask_all(self, method: str, path: str) -> dict[int, Page | None]:
        """Return the answers of all engines that serve."""
        asked = self.serving_ids
        pages = await asyncio.gather(*(self.ask(engine_id, method, path) for engine_id in asked))
        return dict(zip(asked, pages, strict=True))

    async def close(self) -> None:
        """Close all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
