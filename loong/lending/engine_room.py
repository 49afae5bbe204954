"""The rManager of an engine among others, which lend each other room: whole loans instead of single blocks.

All KV of an engine counts as one request of the protocol, which is at home at the engine and has its name.
What it keeps in room of others are its remote blocks. The debtor alone knows which of its requests are there.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from loong.core.placement import InstanceId
from loong.lending.ledger import LoanReason
from loong.lending.messages import (
    Address,
    AskCreditors,
    Creditors,
    EndLoan,
    Envelope,
    Heartbeat,
    HeartbeatSeen,
    LendRoom,
    LoanEnded,
    MoveKVCache,
    RequestPlacementEntry,
    ReturnRoom,
    RoomAllowed,
)
from loong.lending.peers import Peers
from loong.lending.reporting import Key, Reporting
from loong.lending.room_manager import Timing

BLOCK_TOKENS = 16  # of the blocks in messages


@dataclass(frozen=True, slots=True)
class Loan:
    """Room of an engine for another, since a time in seconds. It has `num_tokens`, 0 while it is asked."""

    loan_id: str
    debtor_id: InstanceId
    creditor_id: InstanceId
    num_tokens: int
    since: float
    reason: LoanReason = LoanReason.FULL


@dataclass(frozen=True, slots=True)
class RoomNeed:
    """The tokens of a loan that an engine wants, and the least that it can use.

    A request that no engine has room for alone has `waited` for these seconds; None if there is none.
    """

    num_tokens: int
    least_tokens: int = 0
    waited: float | None = None


class EngineHost(Protocol):
    """An engine as its manager acts on it. No call waits."""

    def ask_room(self, loan: Loan) -> tuple[str, ...] | None:
        """Return configs of workers that would use a loan; None if there can be no more loans."""

    def use_room(self, loan: Loan) -> None:
        """Expect the workers of a loan, which its creditor starts."""

    def drop_room(self, loan: Loan, reason: str) -> None:
        """Expect nothing more of a loan, whose workers have ended."""

    def give_back(self, loan: Loan) -> None:
        """Empty a loan that its creditor needs, as soon as requests can do without; it then ends."""

    def lend(self, loan: Loan, question: LendRoom) -> None:
        """Take room for a loan, as much as there is, and call `EngineRoom.decided`, now or later."""

    def end(self, loan: Loan) -> None:
        """End the workers of a loan. `EngineRoom.ended` follows."""


def name_of(engine_id: InstanceId) -> str:
    """Return the name under which an engine's KV is one request."""
    return f"engine-{engine_id}"


def blocks_of(num_tokens: int) -> int:
    """Return the whole blocks that have room for tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class EngineRoom:
    """The loans of one engine, `borrowed` and `lent`. It asks for one at a time."""

    def __init__(self, peers: Peers, host: EngineHost, timing: Timing | None = None) -> None:
        self.peers, self._host, self._timing = peers, host, timing or Timing()
        (own,) = peers.own
        assert own is not None, "it is no gManager"
        self.engine_id: InstanceId = own
        self.borrowed: dict[str, Loan] = {}
        self.lent: dict[str, Loan] = {}
        self._asked: dict[str, Envelope] = {}  # the questions for loans that are undecided
        self._unwanted: dict[str, tuple[InstanceId, float]] = {}  # loans to end: creditor, last message
        self._search: _Search | None = None
        self._reporting = Reporting()
        self._num_used, self._reported_at, self._reclaimed_at = 0, float("-inf"), float("-inf")

    def borrow(self, need: RoomNeed, now: float) -> list[Envelope]:
        """Ask the gManager who might lend room, unless a loan is looked for or there is no gManager."""
        unanswered = self._give_up(now)
        if self._search is not None:
            return []
        number = self.peers.new_number()
        asked = self.peers.message(self.engine_id, None, number, AskCreditors(blocks_of(need.num_tokens)))
        if asked:
            self._search = _Search(need, number, now)
        return [*unanswered, *asked]

    def reclaim(self, num_tokens: int, now: float) -> list[Envelope]:
        """Ask for room back, of the latest loans first. It is asked again only after a while."""
        if not self.lent or now < self._reclaimed_at + self._timing.promise:
            return []
        self._reclaimed_at, sent = now, list[Envelope]()
        for loan in reversed(self.lent.values()):
            if num_tokens > 0:
                sent += self._notify(loan.debtor_id, ReturnRoom(loan.loan_id))
            num_tokens -= loan.num_tokens
        return sent

    def handle(self, envelope: Envelope, now: float) -> list[Envelope]:
        """Take a message, and return those that follow. One from or for an earlier epoch is ignored."""
        sender_id, body = envelope.sender, envelope.body
        if not self.peers.accepts(envelope):
            return []
        match body:
            case HeartbeatSeen():
                self._reporting.seen(envelope.number)
            case Creditors():
                return self._take_creditors(envelope.number, body.inst_ids, now)
            case RoomAllowed() if sender_id is not None and body.loan_id not in self.borrowed:
                return self._take_answer(sender_id, body, now)
            case LendRoom() if sender_id is not None and body.loan_id not in self._asked | self.lent:
                self._asked[body.loan_id] = envelope
                asked = Loan(body.loan_id, sender_id, self.engine_id, body.num_blocks * BLOCK_TOKENS, now)
                self._host.lend(asked, body)
            case ReturnRoom() if (wanted := self._borrowed_from(body.loan_id, sender_id)) is not None:
                self._host.give_back(wanted)
            case LoanEnded():
                self._unwanted.pop(body.loan_id, None)
                if (ended := self._borrowed_from(body.loan_id, sender_id)) is not None:
                    del self.borrowed[ended.loan_id]
                    self._host.drop_room(ended, f"engine {sender_id} has ended the loan")
            case EndLoan() if sender_id is not None and body.loan_id not in self._asked:
                if (loan := self.lent.get(body.loan_id)) is None:
                    return self._notify(sender_id, LoanEnded(body.loan_id))
                self._host.end(loan)
            case MoveKVCache() if sender_id is None:
                return self._send_home(body)
            case _:
                pass  # for a `RoomManager` or the gManager, or of a loan that is over
        return []

    def tick(self, num_used: int, now: float) -> list[Envelope]:
        """Return the heartbeat if it is time, and what is to be said again.

        `num_used` are the tokens of the engine's own requests here.
        """
        sent = self._give_up(now)
        for loan_id, (creditor_id, sent_at) in list(self._unwanted.items()):
            if sent_at + self._timing.retry <= now:
                self._unwanted[loan_id] = creditor_id, now
                sent += self._notify(creditor_id, EndLoan(loan_id))
        if blocks_of(num_used) != self._num_used:
            self._num_used = blocks_of(num_used)
            self._reporting.change([(name_of(self.engine_id), self.engine_id)])
        if now >= self._reported_at + self._timing.heartbeat and None in self.peers.epochs:
            self._reported_at, number = now, self.peers.new_number()
            entries = tuple(map(self._entry, self._reporting.send(number)))
            sent += self.peers.message(self.engine_id, None, number, Heartbeat(entries))
        return sent

    def decided(self, loan: Loan) -> list[Envelope]:
        """Answer who asked for a loan that has room from now on, or (of 0 tokens) that there is none.

        There is no loan if its debtor is gone.
        """
        question = self._asked.pop(loan.loan_id)
        if self.peers.epochs.get(loan.debtor_id) != question.sender_epoch:
            return []
        if loan.num_tokens:
            self.lent[loan.loan_id] = loan
            self._reporting.change([(name_of(loan.debtor_id), self.engine_id)])
        return self.peers.answer(question, RoomAllowed(loan.loan_id, loan.num_tokens // BLOCK_TOKENS))

    def ended(self, loan_id: str) -> list[Envelope]:
        """Forget a loan whose workers have ended here, and notify its debtor."""
        if (loan := self.lent.pop(loan_id, None)) is None:
            return []
        self._reporting.change([(name_of(loan.debtor_id), self.engine_id)])
        return self._notify(loan.debtor_id, LoanEnded(loan_id))

    def returned(self, loan_id: str, now: float) -> list[Envelope]:
        """Forget a loan that this engine has given back or lost. Its creditor may not know."""
        loan = self.borrowed.pop(loan_id, None)
        return [] if loan is None else self._end(loan_id, loan.creditor_id, now)

    def lost(self, address: Address) -> None:
        """End the loans to a process that is gone, and forget those of it, whose room is gone too."""
        for loan in [loan for loan in self.lent.values() if loan.debtor_id == address]:
            self._host.end(loan)
        for loan in [loan for loan in self.borrowed.values() if loan.creditor_id == address]:
            del self.borrowed[loan.loan_id]
            self._unwanted[loan.loan_id] = loan.creditor_id, float("-inf")  # if it is not, after all
            self._host.drop_room(loan, f"engine {address} was lost")

    def joined(self, address: Address) -> None:
        """Report everything to a new gManager."""
        if address is None:
            debtors = {loan.debtor_id for loan in self.lent.values()} | {self.engine_id}
            self._reporting.restart((name_of(i), self.engine_id) for i in sorted(debtors))

    def _take_creditors(self, number: int, ids: tuple[InstanceId, ...], now: float) -> list[Envelope]:
        if self._search is None or self._search.number != number or self._search.loan is not None:
            return []
        self._search.creditor_ids = list(ids)
        return self._ask_next(self._search, now)

    def _take_answer(self, creditor_id: InstanceId, answer: RoomAllowed, now: float) -> list[Envelope]:
        """Use room that was asked for, or ask the next creditor. A loan that comes too late is to end."""
        search = self._search
        if search is None or search.loan is None or search.loan.loan_id != answer.loan_id:
            return self._end(answer.loan_id, creditor_id, now) if answer.num_blocks else []
        if not answer.num_blocks:
            return self._ask_next(search, now)
        loan = replace(search.loan, num_tokens=answer.num_blocks * BLOCK_TOKENS, since=now)
        self._search, self.borrowed[loan.loan_id] = None, loan
        self._host.use_room(loan)
        return []

    def _give_up(self, now: float) -> list[Envelope]:
        """End a search without an answer, with the loan that was asked for last."""
        search = self._search
        if search is None or search.asked_at + 10 * self._timing.retry > now:
            return []
        self._search = None
        loan = search.loan
        return [] if loan is None else self._end(loan.loan_id, loan.creditor_id, now)

    def _ask_next(self, search: "_Search", now: float) -> list[Envelope]:
        while search.creditor_ids:
            creditor_id = search.creditor_ids.pop(0)
            search.number, search.asked_at = self.peers.new_number(), now
            loan_id = f"loan {self.engine_id}.{self.peers.epoch}.{search.number}"
            search.loan = Loan(loan_id, self.engine_id, creditor_id, 0, now)
            if (configs := self._host.ask_room(search.loan)) is None:
                break
            need, least = search.need, blocks_of(search.need.least_tokens)
            body = LendRoom(loan_id, blocks_of(need.num_tokens), configs, least, need.waited)
            if asked := self.peers.message(self.engine_id, creditor_id, search.number, body):
                return asked
        self._search = None
        return []

    def _send_home(self, order: MoveKVCache) -> list[Envelope]:
        """Ask a debtor to take blocks home, as the gManager says: whole loans, as far as they fit."""
        num_left, sent = order.num_blocks, list[Envelope]()
        for loan in self.lent.values():
            num_blocks = blocks_of(loan.num_tokens)
            if loan.debtor_id == order.dst_inst and num_blocks <= num_left:
                num_left -= num_blocks
                sent += self._notify(loan.debtor_id, ReturnRoom(loan.loan_id))
        return sent

    def _borrowed_from(self, loan_id: str, creditor_id: Address) -> Loan | None:
        loan = self.borrowed.get(loan_id)
        return loan if loan is not None and loan.creditor_id == creditor_id else None

    def _end(self, loan_id: str, creditor_id: InstanceId, now: float) -> list[Envelope]:
        """Notify a creditor that a loan is over, now and until it confirms that."""
        self._unwanted[loan_id] = creditor_id, now
        return self._notify(creditor_id, EndLoan(loan_id))

    def _notify(self, engine_id: InstanceId, body: ReturnRoom | EndLoan | LoanEnded) -> list[Envelope]:
        return self.peers.message(self.engine_id, engine_id, self.peers.new_number(), body)

    def _entry(self, key: Key) -> RequestPlacementEntry:
        request_id, instance_id = key
        num_blocks = self._num_used
        if request_id != name_of(self.engine_id):
            num_blocks = _blocks_by_debtor(self.lent)[request_id]
        return RequestPlacementEntry(
            request_id, instance_id, num_blocks, local=request_id == name_of(self.engine_id)
        )


@dataclass(slots=True)
class _Search:
    """Room that is looked for: the number of the last question, and the creditors still to be asked."""

    need: RoomNeed
    number: int
    asked_at: float
    loan: Loan | None = None
    creditor_ids: list[InstanceId] | None = None


def _blocks_by_debtor(lent: Mapping[str, Loan]) -> Counter[str]:
    found: Counter[str] = Counter()
    for loan in lent.values():
        found[name_of(loan.debtor_id)] += blocks_of(loan.num_tokens)
    return found
