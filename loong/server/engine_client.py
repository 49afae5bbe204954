"""What the HTTP face needs of an engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot
from loong.core.timeline import ClusterHistory


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a request, in tokens; `max_request_kv` is what the cluster holds of one, by its policy."""

    max_model_len: int
    max_request_kv: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress, and if not, why."""

    is_alive: bool
    message: str


class EngineClient(Protocol):
    """An engine, as the server sees it."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds that requests are checked against before they are sent."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[ProducedToken, None]:
        """Tokens of all choices of a request as they are produced; the last of each has a finish reason.

        The engine stamps `request.arrival_time` itself: the clock is its own.
        Closing the generator early aborts the request. Raises `ClusterError` if the engine fails.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """End one choice of a request, unless it has ended; the others go on.

        For whoever reads the tokens, between two of them; no more come of that choice.
        """
        ...

    def health(self) -> Health:
        """From progress, never a constant."""
        ...

    def snapshot(self) -> Snapshot:
        """The cluster now, with the counts since the start."""
        ...

    def history(self) -> ClusterHistory:
        """The last batches and migrations, oldest first."""
        ...


class Tracing(Protocol):
    """Traces of all workers of an engine."""

    def start(self) -> None:
        """Begin with the next batches."""
        ...

    async def write(self) -> Path:
        """End after the batches in flight; the one file with what all workers did."""
        ...
