"""Protocols of an engine, as the HTTP server needs them: to answer requests and to show the cluster."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from loong.core.cached_tokens import CachedTokens
from loong.core.cluster_history import ClusterHistory
from loong.core.errors import LoongError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.core.snapshot import Snapshot
from loong.engine.cluster_size import ClusterSize
from loong.engine.health import Health
from loong.engine.largest_prefixes import CachedPrefix
from loong.engine.prefix_hits import PrefixCounts

Answered: TypeAlias = ProducedToken | PromptLogprobs | CachedTokens | LoongError
PutToken: TypeAlias = Callable[[Answered], None]
"""Takes the tokens of all choices of a request as they are produced, or the error that ends all choices.

The error is an `InvalidRequestError` if the request is at fault, and otherwise a `ClusterError`.
The last token of a choice has a finish reason. The log probabilities of the prompt come before the first
token, if the request wants them and its prompt has more than one token. So does the number of its cached
tokens, unless it is 0.
"""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds of a request, in tokens.

    `max_request_kv` is the most KV of one request that the policy allows.
    """

    max_model_len: int
    max_request_kv: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The load of one client's call: requests with their prompt lengths, each in `num_choices` choices.

    `key` is the index of the API key of the call.
    """

    num_prompt_tokens: Mapping[RequestId, int]
    num_choices: int = 1
    key: int | None = None


class TokenEngine(Protocol):
    """An engine that produces tokens for requests."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds that the caller checks before it submits a request."""
        ...

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a request, which arrives now by the engine's clock, and pass its tokens to `put`."""
        ...

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort one choice of a request unless it has ended. Its tokens stop; the other choices go on.

        The `reason` is ABORT if its client left. A complete answer has its own reason, as with a stop string.
        """
        ...


class EngineClient(TokenEngine, Protocol):
    """An engine as the server's handlers see it, in the same process or in another one."""

    def admit(self, load: RequestLoad) -> AbstractAsyncContextManager[None]:
        """Count requests, all or none, while the context lasts. The counts cover all server processes.

        Raises the errors of `Admission.admit`.
        """
        ...

    def note_parent(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of the request's span, before the request is submitted."""
        ...


class ClusterView(Protocol):
    """The state of an engine's cluster, in the engine's process."""

    @property
    def limits(self) -> EngineLimits:
        """The bounds of a request."""
        ...

    def health(self) -> Health:
        """Return the health, judged by progress."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the present snapshot, with the counts since the start."""
        ...

    def size(self) -> ClusterSize:
        """Return the instances, the number that is asked for, and the most that there can be."""
        ...

    def scale(self, num_instances: int, num_memory: int | None = None) -> None:
        """Begin to change the number of instances, and of memory instances (None: as before).

        Raises `InvalidRequestError` if that is impossible, and `RequestTooLargeError` if a live request would
        never fit.
        """
        ...

    async def wait_for_size(self) -> None:
        """Wait until the instances that are asked for serve. Raises `EngineStoppedError` if none will."""
        ...

    @property
    def prefix_counts(self) -> PrefixCounts | None:
        """The counts of the prefix cache, or None without one."""
        ...

    @property
    def largest_prefixes(self) -> tuple[CachedPrefix, ...]:
        """The largest parts of the prefix cache, as they are or were not long before."""
        ...

    def reset_prefix_cache(self) -> None:
        """Evict all KV that no request reads, before requests that are submitted from now on arrive."""
        ...

    @property
    def num_stray_frames(self) -> int:
        """The number of dropped frames on private sockets that were not messages."""
        ...

    def history(self) -> ClusterHistory:
        """Return the last batches and migrations, oldest first."""
        ...


class EngineInterface(TokenEngine, ClusterView, Protocol):
    """An engine in this process."""


class Tracing(Protocol):
    """The traces of all workers of an engine."""

    async def start(self) -> None:
        """Return when all workers trace. Raises `InvalidRequestError` if they already do."""
        ...

    async def write(self) -> Path:
        """End the traces after the steps in flight, and return the path of the one file with all of them.

        Raises `InvalidRequestError` if no trace was started.
        """
        ...
