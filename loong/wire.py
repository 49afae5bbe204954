"""Messages between the engine and its workers: typed values in msgpack, one ZeroMQ frame each.

No pickle crosses a socket. A message is a pair of its type's name and its fields, so a frame of an unknown
type, or with fields that do not fit, is refused before anything is done. A `range` travels as the bytes of
its three numbers, so that it cannot be taken for a sequence of token ids. Sequences arrive as lists.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from loong.core.errors import LoongError
from loong.core.events import ProducedToken
from loong.core.grammar import Grammar
from loong.core.instructions import ExtendLease, MoveKV, ReleaseKV, RunBatch, RunScoredBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.prompt_logprobs import PromptLogprobs

HEARTBEAT_SECONDS = 1.0  # from one heartbeat of a worker to the next
MAX_FRAME_BYTES = 1 << 30  # a batch of a million tokens has some MB; who sends more is disconnected


class WireError(LoongError):
    """A frame is not a message of ours."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The worker ends."""


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """A request with this grammar is to come; the command is done when the worker has compiled it."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class StartTrace:
    """The worker traces what it does, from its next step on."""

    number: int


@dataclass(frozen=True, slots=True)
class EndTrace:
    """The worker ends its trace before its next step, and writes it to a file of this name, if any."""

    number: int
    path: str | None


@dataclass(frozen=True, slots=True)
class ForgetFailures:
    """The engine knows which batches failed: the worker takes batches of their requests again."""


Command: TypeAlias = (
    RunBatch
    | RunScoredBatch
    | ExtendLease
    | StopLease
    | MoveKV
    | ReleaseKV
    | PrepareGrammar
    | StartTrace
    | EndTrace
    | ForgetFailures
    | Shutdown
)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has its weights and its pools, and the fabric is up."""

    instance_id: InstanceId
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's control thread is alive, and has dropped this many frames since its start."""

    instance_id: InstanceId
    tp_rank: int
    num_stray_frames: int = 0


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """An instance has begun a batch, and has ended all before."""

    batch_id: int
    instance_id: InstanceId
    tp_rank: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A master sampled the tokens of one step; whether it is the last is not known yet."""

    batch_id: int
    step: int
    tokens: tuple[ProducedToken, ...]


@dataclass(frozen=True, slots=True)
class BatchDone:
    """One worker is done with a batch; `tokens` are those of the last step, if it has not told them.

    Whoever heard of these before would hand them on first, and plan while the instance has nothing to do.
    It worked on the batch from `began_at` to `ended_at` (seconds of the machine's monotonic clock).
    """

    batch_id: int
    instance_id: InstanceId
    tp_rank: int
    num_steps: int
    tokens: tuple[ProducedToken, ...] = ()
    began_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A worker has left a batch before its end, because another did not do its part.

    `blamed` is that worker (instance and rank) if it may be lost.
    """

    batch_id: int
    instance_id: InstanceId
    tp_rank: int
    message: str
    blamed: tuple[InstanceId, int] | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """An instance found log probabilities of a prompt in a batch, which it has not reported as done."""

    batch_id: int
    instance_id: InstanceId
    tp_rank: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class MigrationDone:
    """One end of a migration has committed its part, or rolled it back."""

    migration_id: int
    instance_id: InstanceId
    tp_rank: int
    is_committed: bool


@dataclass(frozen=True, slots=True)
class CommandDone:
    """A worker has carried out the command of this number, or says why it cannot."""

    number: int
    instance_id: InstanceId
    tp_rank: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker cannot go on; `blamed` is the worker (instance and rank) whose part it waited for, if any."""

    instance_id: InstanceId
    tp_rank: int
    message: str
    blamed: tuple[InstanceId, int] | None = None


Report: TypeAlias = (
    WorkerReady
    | Heartbeat
    | BatchBegun
    | StepDone
    | PromptScored
    | BatchDone
    | BatchFailed
    | MigrationDone
    | CommandDone
    | WorkerFailed
)

_COMMANDS: tuple[type[Command], ...] = (
    RunBatch,
    RunScoredBatch,
    ExtendLease,
    StopLease,
    MoveKV,
    ReleaseKV,
    PrepareGrammar,
    StartTrace,
    EndTrace,
    ForgetFailures,
    Shutdown,
)
_REPORTS: tuple[type[Report], ...] = (
    WorkerReady,
    Heartbeat,
    BatchBegun,
    StepDone,
    PromptScored,
    BatchDone,
    BatchFailed,
    MigrationDone,
    CommandDone,
    WorkerFailed,
)

Message = TypeVar("Message")


_range = Struct("<qqq")  # start, stop, step


def _encode_other(value: object) -> bytes:
    if isinstance(value, range):
        return _range.pack(value.start, value.stop, value.step)
    raise TypeError(f"{type(value).__name__} does not travel")


def _decode_other(kind: type, value: Any) -> object:  # Any: what msgpack found on the wire
    if kind is range:
        return range(*_range.unpack(value))
    raise TypeError(f"{kind.__name__} does not travel")


# What msgspec raises, and what types of ours raise when they are made of values that do not fit.
_NOT_OURS = (
    msgspec.DecodeError,
    ArithmeticError,
    LookupError,
    LoongError,
    RecursionError,
    StructError,
    TypeError,
    ValueError,
)
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def address(endpoint: str) -> Any:  # Any: pyzmq takes bytes, though its types name only str
    """Return where a socket binds or connects to: a path in it may be of any bytes."""
    return os.fsencode(endpoint)


def encode(message: object) -> bytes:
    """One frame."""
    return _encoder.encode((type(message).__name__, message))


class MessageDecoder(Generic[Message]):
    """Reads messages of some types. Raises `WireError` if a frame is none of them."""

    def __init__(self, kinds: Iterable[type[Message]]) -> None:
        self._decoders: Mapping[str, msgspec.msgpack.Decoder[Message]] = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in kinds
        }

    def __call__(self, frame: bytes) -> Message:
        """The message of one frame."""
        try:
            name, body = _envelope.decode(frame)
            if name not in self._decoders:
                raise LookupError(f"its type is {name[:40]!r}")
            return self._decoders[name].decode(body)
        except _NOT_OURS as error:
            raise WireError(f"a frame of {len(frame)} bytes is no message: {error}") from error


decode_command: MessageDecoder[Command] = MessageDecoder(_COMMANDS)  # what the engine sent
decode_report: MessageDecoder[Report] = MessageDecoder(_REPORTS)  # what a worker sent
