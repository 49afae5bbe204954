"""The messages of the lending protocol (Infinite-LLM, listing 1), and the envelopes that they travel in.

`Heartbeat`, `MoveKVCache` and `TryMoveKVCache` are the paper's. The others are what these leave out: answers,
the blocks themselves, the release of what was lent, and DistKV-LLM's question for creditors. All are bounded.
A transport authenticates frames, and may lose, delay, repeat and reorder them.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from loong.core.errors import LoongError
from loong.core.placement import InstanceId
from loong.core.request import RequestId

MAX_BLOCKS = 1 << 24  # of a request: 268 million tokens
MAX_ENTRIES = 4096  # of a heartbeat; what is left goes with the next
MAX_SENT_BLOCKS = 4096  # of a move
MAX_CREDITORS = 1024  # that are named to a debtor
MAX_RANKS = 64  # of an instance
MAX_CONFIG = 1 << 16  # letters of the configuration of a worker
MAX_ENGINES = 1024

BlockCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
BlockIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
BoundedId: TypeAlias = Annotated[RequestId, Meta(max_length=256)]
Address: TypeAlias = InstanceId | None
"""An instance, whose rManager answers for it; None is the gManager."""


class LendingMessageError(LoongError):
    """A frame is no message of this protocol, or exceeds its bounds."""


class RequestPlacementEntry(Struct, frozen=True):
    """The blocks of a request on an instance; `local` on its debtor instance, where it is computed."""

    req_id: BoundedId
    inst_id: InstanceId
    num_blocks: BlockCount
    local: bool


class Heartbeat(Struct, frozen=True, tag=True):
    """Entries of an engine's instances that the manager has not confirmed; all of them for a new manager."""

    entries: Annotated[tuple[RequestPlacementEntry, ...], Meta(max_length=MAX_ENTRIES)]


class HeartbeatSeen(Struct, frozen=True, tag=True):
    """The manager has the entries of a heartbeat."""


class MoveKVCache(Struct, frozen=True, tag=True):
    """The manager asks an instance to move blocks of a request to `dst_inst`."""

    req_id: BoundedId
    num_blocks: BlockCount
    dst_inst: InstanceId


class TryMoveKVCache(Struct, frozen=True, tag=True):
    """A source asks a destination to reserve room for blocks of a request."""

    req_id: BoundedId
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_SENT_BLOCKS)]


class MoveAllowed(Struct, frozen=True, tag=True):
    """The answer to `TryMoveKVCache`."""

    is_allowed: bool


class SendBlocks(Struct, frozen=True, tag=True):
    """The blocks of a request that arrive for a reservation, by their places in its KV."""

    req_id: BoundedId
    indexes: Annotated[tuple[BlockIndex, ...], Meta(min_length=1, max_length=MAX_SENT_BLOCKS)]


class BlocksStored(Struct, frozen=True, tag=True):
    """The answer to `SendBlocks`: from now on the destination keeps them, or it never will by this move."""

    is_stored: bool


class ReleaseBlocks(Struct, frozen=True, tag=True):
    """A request has ended: an instance frees what it keeps of it, and promises nothing more for it."""

    req_id: BoundedId


class BlocksReleased(Struct, frozen=True, tag=True):
    """The answer to `ReleaseBlocks`."""


class AskCreditors(Struct, frozen=True, tag=True):
    """A debtor that is full asks who might lend it room (DistKV-LLM)."""

    num_blocks: BlockCount


class Creditors(Struct, frozen=True, tag=True):
    """The instances that a debtor asks in turn."""

    inst_ids: Annotated[tuple[InstanceId, ...], Meta(max_length=MAX_CREDITORS)]


class LendRoom(Struct, frozen=True, tag=True):
    """An engine asks another for room of `num_blocks`, or fewer, for workers with these configs.

    With `waited`, `least_blocks` are for a request that no engine has room for alone, and that has waited for
    these seconds.
    """

    loan_id: BoundedId
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    configs: Annotated[tuple[Annotated[str, Meta(max_length=MAX_CONFIG)], ...], Meta(max_length=MAX_RANKS)]
    least_blocks: BlockCount = 0
    waited: float | None = None


class RoomAllowed(Struct, frozen=True, tag=True):
    """The answer to `LendRoom`: the blocks of the loan, 0 if there is none."""

    loan_id: BoundedId
    num_blocks: BlockCount


class ReturnRoom(Struct, frozen=True, tag=True):
    """The creditor needs the room of a loan itself."""

    loan_id: BoundedId


class EndLoan(Struct, frozen=True, tag=True):
    """The debtor does not use a loan, or no more."""

    loan_id: BoundedId


class LoanEnded(Struct, frozen=True, tag=True):
    """A loan has ended at its creditor. What it kept is lost."""

    loan_id: BoundedId


Body: TypeAlias = (
    Heartbeat
    | HeartbeatSeen
    | MoveKVCache
    | TryMoveKVCache
    | MoveAllowed
    | SendBlocks
    | BlocksStored
    | ReleaseBlocks
    | BlocksReleased
    | AskCreditors
    | Creditors
    | LendRoom
    | RoomAllowed
    | ReturnRoom
    | EndLoan
    | LoanEnded
)


class Envelope(Struct, frozen=True, tag=True):
    """A message from a process to another.

    Each process has an epoch, larger than that of the process before it at its address. What is from or for
    an earlier one is ignored. A question and its answer have the same `number`; its asker uses each once.
    """

    sender: Address
    receiver: Address
    sender_epoch: int
    receiver_epoch: int
    number: int
    body: Body


class Member(Struct, frozen=True):
    """A process that is there: its address, epoch, and the tokens that its instances hold."""

    address: Address
    epoch: int
    capacity: int = 0


class Members(Struct, frozen=True, tag=True):
    """All processes that are there, as a supervisor knows them."""

    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_ENGINES)]


Frame: TypeAlias = Envelope | Members

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encoded(message: Frame) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def decoded(frame: bytes) -> Frame:
    """Return the message of a frame. Raises `LendingMessageError` if it is none, or exceeds its bounds."""
    try:
        return _decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise LendingMessageError(f"a frame of {len(frame)} bytes is no lending message: {error}") from error
