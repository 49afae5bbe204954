"""What an API process calls for, and what it is told, in frames of `loong.wire`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import Request, RequestId
from loong.engine.client import Asking
from loong.wire import MessageDecoder


@dataclass(frozen=True, slots=True)
class Listening:
    """The process answers clients from now on."""


@dataclass(frozen=True, slots=True)
class Here:
    """The process is asked whether it is there, and is."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Count requests in, or refuse them; the answer names the ticket, and so does who leaves."""

    ticket: int
    asking: Asking


@dataclass(frozen=True, slots=True)
class Leave:
    """What was admitted is over, or nobody waits for the answer any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Begin a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End one choice of a request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class NoteParent:
    """The span of a request that is to come has this parent."""

    request_id: RequestId
    traceparent: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Requests are counted in."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests are not; the rest is what the client is told."""

    ticket: int
    status: int
    message: str
    code: str
    param: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Produced:
    """Tokens of any requests of the process, in their order."""

    tokens: tuple[ProducedToken, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log probabilities of the prompt of this request, before its tokens."""

    request_id: RequestId
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Failed:
    """No more tokens come of these choices of a request; without a reason, since the engine has stopped."""

    request_ids: tuple[RequestId, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class StopListening:
    """Refuse new connections; the open ones go on."""


@dataclass(frozen=True, slots=True)
class AreYouThere:
    """Asked now and then; the answer is `Here`."""


Call: TypeAlias = Listening | Here | Admit | Leave | Submit | Abort | NoteParent
Tidings: TypeAlias = Admitted | Refused | Produced | Scored | Failed | StopListening | AreYouThere

decode_call: MessageDecoder[Call] = MessageDecoder((Listening, Here, Admit, Leave, Submit, Abort, NoteParent))
decode_tidings: MessageDecoder[Tidings] = MessageDecoder(
    (Admitted, Refused, Produced, Scored, Failed, StopListening, AreYouThere)
)
