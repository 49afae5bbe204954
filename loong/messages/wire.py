"""Messages between the engine and its workers: typed values in msgpack, one ZeroMQ frame each.

No pickle crosses a socket. A message is the pair of its type's name and its fields. A frame with an unknown
type or with wrong fields is refused before it has an effect. A `range` travels as the bytes of its three
numbers, so that it differs from a sequence of token ids. Sequences arrive as lists.
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
from loong.core.instance import Service
from loong.core.instructions import (
    ExtendLease,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    RunScoredBatch,
    ShareKV,
    StopLease,
)
from loong.core.kv_layout import LentSlots
from loong.core.placement import InstanceId
from loong.core.prompt_logprobs import PromptLogprobs

HEARTBEAT_SECONDS = 1.0  # between two heartbeats of a worker
MAX_FRAME_BYTES = (
    1 << 30
)  # far above a batch of a million tokens (some MB); larger frames disconnect the sender


class WireError(LoongError):
    """A frame is not a message of this protocol."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ends the worker."""


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Announces a request with this grammar. The command is done when the worker has compiled the grammar."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class StartTrace:
    """Starts a trace of the worker, from its next step on."""

    number: int


@dataclass(frozen=True, slots=True)
class EndTrace:
    """Ends the worker's trace before its next step, and writes it to `path`, if given."""

    number: int
    path: str | None


@dataclass(frozen=True, slots=True)
class ForgetFailures:
    """The engine knows that these batches failed: the worker takes batches of their requests again."""

    batch_ids: tuple[int, ...]


Command: TypeAlias = (
    RunBatch
    | RunScoredBatch
    | ExtendLease
    | StopLease
    | MoveKV
    | ReleaseKV
    | ReleaseWindows
    | ShareKV
    | LendSlots
    | PrepareGrammar
    | StartTrace
    | EndTrace
    | ForgetFailures
    | Shutdown
)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has its weights and its pools, and the fabric is connected.

    On another host than the engine's it takes commands at an endpoint, which is known only now. What it
    `serves` depends on the fabric.
    """

    instance_id: InstanceId
    tp_rank: int
    commands_endpoint: str = ""
    serves: Service = Service.ALL


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's control thread is alive. It has dropped `num_stray_frames` frames since its start."""

    instance_id: InstanceId
    tp_rank: int
    num_stray_frames: int = 0


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """An instance has begun a batch, and has ended all earlier ones."""

    batch_id: int
    instance_id: InstanceId
    tp_rank: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A master has sampled the tokens of one step, the last one of the batch if `is_last`."""

    batch_id: int
    step: int
    tokens: tuple[ProducedToken, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class BatchDone:
    """One worker has ended a batch.

    The tokens of the last step leave together with this report, so that one plan follows both. The worker
    computed the batch from `began_at` to `ended_at` (seconds of the machine's monotonic clock).
    """

    batch_id: int
    instance_id: InstanceId
    tp_rank: int
    num_steps: int
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
    """An instance has log probabilities of a prompt in a batch that it has not yet reported as done."""

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
    """A worker has carried out the command of this number, or reports why it cannot."""

    number: int
    instance_id: InstanceId
    tp_rank: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SlotsLent:
    """A worker keeps slots free for another engine."""

    loan_id: str
    instance_id: InstanceId
    tp_rank: int
    slots: LentSlots


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker cannot go on.

    `blamed` is the worker (instance and rank) that it waited for in vain, if any.
    """

    instance_id: InstanceId
    tp_rank: int
    message: str
    blamed: tuple[InstanceId, int] | None = None


BatchReport: TypeAlias = BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed
"""A worker's report of a batch in flight."""
WorkerReport: TypeAlias = WorkerReady | Heartbeat | MigrationDone | CommandDone | SlotsLent | WorkerFailed
"""Any other report."""
Report: TypeAlias = BatchReport | WorkerReport

_COMMANDS: tuple[type[Command], ...] = (
    RunBatch,
    RunScoredBatch,
    ExtendLease,
    StopLease,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    ShareKV,
    LendSlots,
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
    SlotsLent,
    WorkerFailed,
)

Message = TypeVar("Message")


_range = Struct("<qqq")  # start, stop, step


def _encode_other(value: object) -> bytes:
    if isinstance(value, range):
        return _range.pack(value.start, value.stop, value.step)
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_other(kind: type, value: Any) -> object:  # Any: msgpack's own types
    if kind is range:
        return range(*_range.unpack(value))
    raise TypeError(f"{kind.__name__} cannot be decoded")


# Errors of msgspec, and errors of our types when their values do not fit.
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
    """Return the address for a socket's bind or connect. A path in it may contain any bytes."""
    return os.fsencode(endpoint)


def encode(message: object) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode((type(message).__name__, message))


class MessageDecoder(Generic[Message]):
    """Decodes messages of some types. Raises `WireError` if a frame is none of them."""

    def __init__(self, kinds: Iterable[type[Message]]) -> None:
        self._decoders: Mapping[str, msgspec.msgpack.Decoder[Message]] = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in kinds
        }

    def __call__(self, frame: bytes) -> Message:
        """Return the message of a frame."""
        try:
            name, body = _envelope.decode(frame)
            if name not in self._decoders:
                raise LookupError(f"its type is {name[:40]!r}")
            return self._decoders[name].decode(body)
        except _NOT_OURS as error:
            raise WireError(f"a frame of {len(frame)} bytes is not a message: {error}") from error


decode_command: MessageDecoder[Command] = MessageDecoder(_COMMANDS)  # what the engine sent
decode_report: MessageDecoder[Report] = MessageDecoder(_REPORTS)  # what a worker sent
