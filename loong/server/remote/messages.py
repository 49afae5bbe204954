"""Messages between an API process and the engine's process, in frames of `loong.messages.wire`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.cached_tokens import CachedTokens
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.engine.client import EngineLimits, RequestLoad
from loong.messages.wire import MessageDecoder


@dataclass(frozen=True, slots=True)
class Listening:
    """The API process answers clients from now on."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a ping."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Asks to count requests. The answer and `Leave` name the ticket."""

    ticket: int
    load: RequestLoad


@dataclass(frozen=True, slots=True)
class Leave:
    """The requests of a ticket have ended, or the client no longer waits for the answer."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Begins a request."""

    request: NewRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts one choice of a request, with the reason of its end."""

    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class NoteParent:
    """Sets the parent of the span of a request that follows."""

    request_id: RequestId
    traceparent: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """The requests of a ticket are counted."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The requests of a ticket are refused, with the error for the client."""

    ticket: int
    status: int
    message: str
    code: str
    param: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Produced:
    """Tokens of any requests of the process, in order."""

    tokens: tuple[ProducedToken, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log probabilities of a request's prompt, sent before its tokens."""

    request_id: RequestId
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class FoundCached:
    """The number of cached tokens of a request, sent before its tokens."""

    cached: CachedTokens


@dataclass(frozen=True, slots=True)
class Failed:
    """These choices of a request have failed. Without a reason, the engine has stopped.

    With `is_invalid`, the request is at fault. `code` is that of a `RequestFailedError`.
    """

    request_ids: tuple[RequestId, ...]
    reason: str | None
    is_invalid: bool = False
    code: str | None = None


@dataclass(frozen=True, slots=True)
class StopListening:
    """Asks to refuse new connections. Open connections stay."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks the API process for an answer."""


@dataclass(frozen=True, slots=True)
class NewLimits:
    """The bounds of a request from now on."""

    limits: EngineLimits


Call: TypeAlias = Listening | Pong | Admit | Leave | Submit | Abort | NoteParent
Notice: TypeAlias = (
    Admitted | Refused | Produced | Scored | FoundCached | Failed | StopListening | Ping | NewLimits
)

decode_call: MessageDecoder[Call] = MessageDecoder((Listening, Pong, Admit, Leave, Submit, Abort, NoteParent))
decode_notice: MessageDecoder[Notice] = MessageDecoder(
    (Admitted, Refused, Produced, Scored, FoundCached, Failed, StopListening, Ping, NewLimits)
)
