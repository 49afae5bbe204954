"""What the HTTP face needs of an engine."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.instance import ESPGroup
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a request, in tokens."""

    max_model_len: int
    kv_capacity: int  # of the whole cluster
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress, and if not, why."""

    is_alive: bool
    message: str


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A batch that ran, for timelines: seconds since the engine's start."""

    batch_id: int
    group: ESPGroup
    phase: str  # prefill, decode or mixed
    started_at: float
    ended_at: float
    request_ids: tuple[RequestId, ...]
    kv_used: tuple[tuple[int, int], ...]  # (instance, tokens) of all instances, at the end


class EngineClient(Protocol):
    """An engine, as the server sees it."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds that requests are checked against before they are sent."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[ProducedToken, None]:
        """Tokens of one request as they are produced; the last has a finish reason.

        Closing the generator early aborts the request. Raises `ClusterError` if the engine fails.
        """
        ...

    def health(self) -> Health:
        """From progress, never a constant."""
        ...

    def snapshot(self) -> Snapshot:
        """The cluster now, with the counts since the start."""
        ...

    def timeline(self) -> Sequence[BatchSlice]:
        """The batches of the last minutes, oldest first."""
        ...
