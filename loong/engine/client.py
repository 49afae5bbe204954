"""What the HTTP face needs of an engine: to answer requests, and to tell of the cluster."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from loong.core.cluster_history import ClusterHistory
from loong.core.errors import ClusterError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import Request, RequestId
from loong.core.snapshot import Snapshot

PutToken: TypeAlias = Callable[[ProducedToken | PromptLogprobs | ClusterError], None]
"""Takes the tokens of all choices of a request as they are produced, the last of each with a finish reason;
or the error that ends them all. Before the first token come the log probabilities of the prompt, if they were
asked for and it has more than one token."""


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


@dataclass(frozen=True, slots=True)
class Asking:
    """What one client asks for: requests, with the tokens of their prompts, in so many choices each.

    `key` is the number of the API key that came with them.
    """

    num_prompt_tokens: Mapping[RequestId, int]
    num_choices: int = 1
    key: int | None = None


class TokenEngine(Protocol):
    """Makes tokens for requests."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds that requests are checked against before they are sent."""
        ...

    def submit(self, request: Request, put: PutToken) -> None:
        """Begin a request, and hand its tokens to `put`.

        The engine stamps `request.arrival_time` itself: the clock is its own.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """End one choice of a request, unless it has ended; the others go on, and no more comes of it."""
        ...


class EngineClient(TokenEngine, Protocol):
    """An engine as those see it who answer requests, in its process or in another."""

    def admit(self, asking: Asking) -> AbstractAsyncContextManager[None]:
        """Count requests in while the context lasts, all or none; of whatever process they are.

        Raises what `Admission.admit` does.
        """
        ...

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Remember whose child the request's span is, before it is submitted."""
        ...


class ClusterView(Protocol):
    """What an engine tells of its cluster, in its own process."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds of requests."""
        ...

    def health(self) -> Health:
        """From progress, never a constant."""
        ...

    def snapshot(self) -> Snapshot:
        """The cluster now, with the counts since the start."""
        ...

    @property
    def num_stray_frames(self) -> int:
        """Frames on private sockets that were no messages, and were dropped."""
        ...

    def history(self) -> ClusterHistory:
        """The last batches and migrations, oldest first."""
        ...


class EngineInterface(TokenEngine, ClusterView, Protocol):
    """An engine of this process."""


class Tracing(Protocol):
    """Traces of all workers of an engine."""

    async def start(self) -> None:
        """Return once all trace. Raises `InvalidRequestError` if they do already."""
        ...

    async def write(self) -> Path:
        """End after the steps in flight; the one file with what all workers did.

        Raises `InvalidRequestError` if none was started.
        """
        ...
