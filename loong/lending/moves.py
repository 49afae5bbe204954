"""A move of blocks: try (reserve at the destination), copy, commit at both ends. Refused, nothing changes.

The source keeps its blocks until it knows that they are stored. So it repeats `SendBlocks` until it has an
answer, or the destination is lost. An unanswered `TryMoveKVCache` is given up: the promise expires.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.block_map import BlockMap
from loong.lending.messages import (
    MAX_SENT_BLOCKS,
    BlocksStored,
    Envelope,
    MoveAllowed,
    SendBlocks,
    TryMoveKVCache,
)
from loong.lending.peers import Peers
from loong.lending.promises import Promises, key_of


class Phase(Enum):
    """The question that a move has asked last."""

    ASKED = "asked"  # for room
    SENT = "sent"  # its blocks


@dataclass(slots=True)
class Move:
    """Blocks of a request on their way, and when the last message of it was sent."""

    request_id: RequestId
    indexes: tuple[int, ...]
    source_id: InstanceId
    destination_id: InstanceId
    phase: Phase
    sent_at: float


class Moves:
    """The moves from and to an engine's instances."""

    def __init__(self, blocks: BlockMap, promises: Promises, peers: Peers, retry_seconds: float) -> None:
        self.open: dict[int, Move] = {}
        self.num_refused = self.num_given_up = self.num_moved_blocks = 0
        self._blocks, self._promises, self._peers = blocks, promises, peers
        self._retry_seconds = retry_seconds

    def start(
        self,
        request_id: RequestId,
        num_blocks: int,
        source_id: InstanceId,
        destination_id: InstanceId,
        now: float,
    ) -> list[Envelope]:
        """Ask for room for up to `num_blocks` of a request's blocks on an instance.

        Nothing happens if there are none, or if the destination is no place for them: blocks leave their home
        for any instance, and come back only there.
        """
        is_home = self._blocks.is_home(request_id, source_id)
        if source_id == destination_id or not (is_home or self._blocks.home_of(request_id) == destination_id):
            return []
        movable = self._blocks.movable(request_id, source_id, self._moving(request_id))
        if not (indexes := tuple(movable[: min(num_blocks, MAX_SENT_BLOCKS)])):
            return []
        number = self._peers.new_number()
        ask = TryMoveKVCache(request_id, len(indexes))
        if asked := self._peers.message(source_id, destination_id, number, ask):
            move = Move(request_id, indexes, source_id, destination_id, Phase.ASKED, now)
            self.open[number] = move
        return asked

    def on_try(self, envelope: Envelope, asked: TryMoveKVCache, is_over: bool, now: float) -> list[Envelope]:
        """Answer a source that asks for room. Nothing is kept of a request that `is_over`."""
        destination_id = envelope.receiver
        assert destination_id is not None, "instances have room"
        is_home = self._blocks.is_home(asked.req_id, destination_id)
        is_allowed = not is_over and self._promises.ask(
            key_of(envelope), asked.req_id, destination_id, asked.num_blocks, now, may_use_host=not is_home
        )
        return self._peers.answer(envelope, MoveAllowed(is_allowed))

    def on_allowed(self, envelope: Envelope, is_allowed: bool, now: float) -> list[Envelope]:
        """Send blocks that have room. If they have none, their request stays as it is."""
        move = self.open.get(envelope.number)
        if move is None or move.phase is not Phase.ASKED:
            return []
        if not is_allowed:
            self.num_refused += 1
            del self.open[envelope.number]
            return []
        move.phase, move.sent_at = Phase.SENT, now
        return self._send(envelope.number, move)

    def on_blocks(self, envelope: Envelope, sent: SendBlocks, now: float) -> list[Envelope]:
        """Store blocks in the room that was promised for them, and say whether they are stored."""
        key = key_of(envelope)
        is_stored = self._promises.answer_of(key)
        if is_stored is None:
            is_stored = self._store(envelope, sent, now)
            self._promises.end(key, is_stored=is_stored, now=now)
        return self._peers.answer(envelope, BlocksStored(is_stored))

    def on_stored(self, envelope: Envelope, is_stored: bool) -> None:
        """End a move: its blocks have left, or stay."""
        move = self.open.get(envelope.number)
        if move is None or move.phase is not Phase.SENT:
            return
        del self.open[envelope.number]
        if is_stored:
            self.num_moved_blocks += len(move.indexes)
            self._blocks.moved_away(move.request_id, move.indexes, move.source_id, move.destination_id)

    def tick(self, now: float) -> Iterator[Envelope]:
        """Send again what has no answer, and give up moves whose destination says nothing to the question."""
        for number, move in list(self.open.items()):
            if move.sent_at + self._retry_seconds > now:
                continue
            if move.phase is Phase.ASKED:
                self.num_given_up += 1
                del self.open[number]
            else:
                move.sent_at = now
                yield from self._send(number, move)

    def drop(self, request_id: RequestId) -> frozenset[InstanceId]:
        """Forget the moves of a request, and return where they were to go."""
        numbers = [number for number, move in self.open.items() if move.request_id == request_id]
        return frozenset(self.open.pop(number).destination_id for number in numbers)

    def lost(self, instance_id: InstanceId) -> None:
        """Forget the moves to an instance that is lost: their blocks stay."""
        self.open = {n: move for n, move in self.open.items() if move.destination_id != instance_id}

    def _moving(self, request_id: RequestId) -> Sequence[int]:
        return [i for move in self.open.values() if move.request_id == request_id for i in move.indexes]

    def _send(self, number: int, move: Move) -> list[Envelope]:
        body = SendBlocks(move.request_id, move.indexes)
        return self._peers.message(move.source_id, move.destination_id, number, body)

    def _store(self, envelope: Envelope, sent: SendBlocks, now: float) -> bool:
        """Put blocks into the room that waits for them, if it does and they belong there."""
        promise = self._promises.take(key_of(envelope), now)
        if promise is None:
            return False
        assert envelope.sender is not None, "instances send blocks"
        pool = self._blocks.pools[promise.destination_id]
        place = promise.destination_id, envelope.sender
        is_promised = promise.request_id == sent.req_id and len(promise.rooms) == len(set(sent.indexes))
        if not is_promised or not self._blocks.can_take(sent.req_id, sent.indexes, *place):
            pool.cancel(promise.rooms)
            return False
        pool.fill(sent.req_id, sent.indexes, promise.rooms)
        self._blocks.took(sent.req_id, sent.indexes, *place)
        return True
