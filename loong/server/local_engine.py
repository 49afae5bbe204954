"""The engine client for an engine in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.engine.client import Answered, EngineLimits, PutToken, RequestLoad, TokenEngine
from loong.server.admission import Admission


class SpanParents(Protocol):
    """Takes the parents of spans of requests that follow."""

    def note(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of a request's span."""
        ...


class LocalEngineClient:
    """An `EngineClient` that counts waiting requests with an `Admission`."""

    def __init__(self, engine: TokenEngine, admission: Admission, spans: SpanParents | None = None) -> None:
        self._engine, self._admission, self._spans = engine, admission, spans

    @property
    def limits(self) -> EngineLimits:
        """The bounds of the engine."""
        return self._engine.limits

    @asynccontextmanager
    async def admit(self, load: RequestLoad) -> AsyncIterator[None]:
        """Count requests while the context lasts."""
        with self._admission.admit(load):
            yield

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a request, which counts as waiting until its first token."""
        stop_waiting = self._admission.stop_waiting

        def count_and_put(token: Answered) -> None:
            if isinstance(token, ProducedToken):
                stop_waiting(token.request_id)
            put(token)

        self._engine.submit(request, count_and_put)

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one choice of a request unless it has ended."""
        self._engine.abort(request_id, reason)

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of the request's span."""
        if self._spans is not None:
            self._spans.note(request_id, traceparent)
