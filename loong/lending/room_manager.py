"""The rManager: it owns the room of its engine's instances, and nobody else grants it.

It takes messages and the time, and returns messages. It never waits. A gManager that is gone changes nothing
but new loans.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.block_map import BlockMap
from loong.lending.borrowings import Borrowings
from loong.lending.messages import (
    Address,
    AskCreditors,
    BlocksReleased,
    BlocksStored,
    Creditors,
    EndLoan,
    Envelope,
    Heartbeat,
    HeartbeatSeen,
    LendRoom,
    LoanEnded,
    MoveAllowed,
    MoveKVCache,
    ReleaseBlocks,
    ReturnRoom,
    RoomAllowed,
    SendBlocks,
    TryMoveKVCache,
)
from loong.lending.moves import Moves
from loong.lending.peers import Peers
from loong.lending.promises import Promises
from loong.lending.rblocks import RBlockPool
from loong.lending.recent import Recent
from loong.lending.releases import Releases
from loong.lending.reporting import Reporting


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: between heartbeats, of a promise, before a message is repeated, and that one may be late."""

    heartbeat: float = 0.1
    promise: float = 1.0
    retry: float = 0.2
    memory: float = 600.0


class RoomManager:
    """The manager of one engine's instances. Its first instance sends heartbeats."""

    def __init__(
        self, peers: Peers, pools: Mapping[InstanceId, RBlockPool], timing: Timing | None = None
    ) -> None:
        self.peers, self.timing = peers, timing or Timing()
        self.reporting = Reporting()
        self.blocks = BlockMap(pools, self.reporting)
        self.promises = Promises(pools, self.timing.promise, self.timing.memory)
        self.moves = Moves(self.blocks, self.promises, peers, self.timing.retry)
        self.releases = Releases(peers, self.timing.retry, self.timing.memory)
        self.borrowings = Borrowings(self.blocks, self.moves, peers, self.timing.retry)
        self._reported_at = -self.timing.heartbeat
        self._orders = Recent[tuple[int, int], bool](self.timing.memory)  # of gManagers, by epoch and number

    def allocate(self, request_id: RequestId, home_id: InstanceId, num_blocks: int) -> bool:
        """Take room for a request's next blocks at its home; False if that is full."""
        return self.blocks.allocate(request_id, home_id, num_blocks)

    def finish(self, request_id: RequestId, now: float) -> list[Envelope]:
        """Free all room of a request that has ended, here and elsewhere."""
        home_id = self.blocks.homes[request_id].home_id
        kept_at = self.moves.drop(request_id) | self.blocks.finish(request_id)
        self.promises.cancel(lambda _, promise: promise.request_id == request_id, now)
        return self.releases.start(request_id, home_id, kept_at - {home_id}, now)

    def borrow(self, instance_id: InstanceId, num_blocks: int, now: float) -> list[Envelope]:
        """Ask for room for blocks that an instance lacks: at creditors named by the gManager."""
        return self.borrowings.start(instance_id, num_blocks, now)

    def reclaim(self, instance_id: InstanceId, num_blocks: int, now: float) -> list[Envelope]:
        """Move up to this many blocks that an instance keeps for others home, where there is room."""
        pool, sent = self.blocks.pools[instance_id], list[Envelope]()
        sizes = {r: pool.count(r) for r in pool.request_ids if r in self.blocks.hosted}
        for request_id in sorted(sizes, key=lambda r: (-sizes[r], r)):
            if num_blocks <= 0:
                break
            sent += self.moves.start(request_id, num_blocks, instance_id, self.blocks.hosted[request_id], now)
            num_blocks -= sizes[request_id]
        return sent

    def handle(self, envelope: Envelope, now: float) -> list[Envelope]:
        """Take a message, and return those that follow. One from or for an earlier epoch is ignored."""
        if not self.peers.accepts(envelope) or (instance_id := envelope.receiver) is None:
            return []
        number, body = envelope.number, envelope.body
        match body:
            case MoveKVCache() if not self._is_new_order(envelope, now):
                return []
            case MoveKVCache():
                return self.moves.start(body.req_id, body.num_blocks, instance_id, body.dst_inst, now)
            case TryMoveKVCache():
                return self.moves.on_try(envelope, body, self.releases.is_over(body.req_id), now)
            case MoveAllowed():
                sent = self.moves.on_allowed(envelope, body.is_allowed, now)
                return sent + self.borrowings.on_allowed(instance_id, number, body.is_allowed, now)
            case SendBlocks():
                return self.moves.on_blocks(envelope, body, now)
            case BlocksStored():
                self.moves.on_stored(envelope, body.is_stored)
            case ReleaseBlocks():
                self._release(body.req_id, now)
                return self.peers.answer(envelope, BlocksReleased())
            case BlocksReleased():
                self.releases.confirmed(number)
            case HeartbeatSeen():
                self.reporting.seen(number)
            case Creditors():
                return self.borrowings.on_creditors(instance_id, number, body.inst_ids, now)
            case Heartbeat() | AskCreditors():
                pass  # for the gManager
            case LendRoom() | RoomAllowed() | ReturnRoom() | EndLoan() | LoanEnded():
                pass  # for an `EngineRoom`
            case _:
                assert_never(body)
        return []

    def tick(self, now: float) -> list[Envelope]:
        """Return the heartbeat if it is time, and what is to be sent again. Free expired promises."""
        self.promises.expire(now)
        sent = [*self.moves.tick(now), *self.releases.tick(now), *self.borrowings.tick(now)]
        if now >= self._reported_at + self.timing.heartbeat and None in self.peers.epochs:
            self._reported_at = now
            number = self.peers.new_number()
            entries = tuple(map(self.blocks.entry, self.reporting.send(number)))
            sent += self.peers.message(self.peers.own[0], None, number, Heartbeat(entries))
        return sent

    def joined(self, address: Address, epoch: int) -> None:
        """Know a new process. The next heartbeats to a new gManager have everything."""
        self.peers.joined(address, epoch)
        if address is None:
            self.reporting.restart(self.blocks.keys)

    def lost(self, address: Address, now: float) -> None:
        """Forget a process, what was kept for it, and what it kept."""
        self.peers.lost(address)
        if address is None:
            return
        self.promises.cancel(lambda key, _: key[0] == address, now)
        self.moves.lost(address)
        self.releases.lost(address)
        self.blocks.lost(address)

    def _is_new_order(self, envelope: Envelope, now: float) -> bool:
        """Return whether a gManager's message comes for the first time."""
        key = envelope.sender_epoch, envelope.number
        is_new = envelope.sender is None and key not in self._orders
        self._orders.set(key, True, now)
        return is_new

    def _release(self, request_id: RequestId, now: float) -> None:
        self.releases.end(request_id, now)
        self.moves.drop(request_id)
        self.promises.cancel(lambda _, promise: promise.request_id == request_id, now)
        self.blocks.release(request_id)
