"""The engine of this process, for those who answer requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loong.core.errors import ClusterError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import Request, RequestId
from loong.engine.client import Asking, EngineLimits, PutToken, TokenEngine
from loong.server.admission import Admission
from loong.server.metrics.spans import Spans


class LocalEngineClient:
    """An `EngineClient` that counts what waits for the engine beside it."""

    def __init__(self, engine: TokenEngine, admission: Admission, spans: Spans | None = None) -> None:
        self._engine, self._admission, self._spans = engine, admission, spans

    @property
    def limits(self) -> EngineLimits:
        """The engine's."""
        return self._engine.limits

    @asynccontextmanager
    async def admit(self, asking: Asking) -> AsyncIterator[None]:
        """Count requests in while the context lasts."""
        with self._admission.admit(asking):
            yield

    def submit(self, request: Request, put: PutToken) -> None:
        """Begin a request; it waits until its first token."""
        stop_waiting = self._admission.stop_waiting

        def count_and_put(token: ProducedToken | PromptLogprobs | ClusterError) -> None:
            if isinstance(token, ProducedToken):
                stop_waiting(token.request_id)
            put(token)

        self._engine.submit(request, count_and_put)

    def abort(self, request_id: RequestId) -> None:
        """End one choice of a request, unless it has ended."""
        self._engine.abort(request_id)

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Remember whose child the request's span is."""
        if self._spans is not None:
            self._spans.note(request_id, traceparent)
