"""An engine that lends room to others, and borrows it: what its manager decides happens to its instances."""

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from loong.core.applied import Applied
from loong.core.errors import ConfigError
from loong.core.events import Event, InstanceLeft, InstanceLost, RoomLent, RoomReturned
from loong.core.instructions import Instruction
from loong.core.kv_layout import LentSlots
from loong.core.observer import Observer
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.engine.room_borrowing import RoomBorrowing
from loong.engine.room_need import own_tokens, reclaimed_tokens, room_to_lend
from loong.executor.room_workers import RoomWorkers
from loong.executor.workers import WorkersExecutor
from loong.lending.engine_room import BLOCK_TOKENS, EngineRoom, Loan, RoomNeed
from loong.lending.messages import Envelope, LendRoom, Members
from loong.lending.peers import Peers
from loong.messages.wire import SlotsLent

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lent:
    """A loan of this engine's room from the question to its end, with the slots of the ranks so far.

    `has_room` once the state has taken it from the instance.
    """

    loan: Loan
    configs: tuple[str, ...]
    instance_id: InstanceId
    has_room: bool = False
    slots: dict[int, LentSlots] = field(default_factory=dict)


class RoomLending(Observer):
    """Implements `EngineHost` for an engine with real workers. It observes the loop.

    Room that is borrowed becomes memory instances with some of `loan_ids`. `snapshot` returns the present
    state, and `send` sends messages. `tick` is to be called every few tenths of a second.
    """

    def __init__(
        self,
        peers: Peers,
        executor: WorkersExecutor,
        workers: RoomWorkers,
        loan_ids: Sequence[InstanceId],
        snapshot: Callable[[], Snapshot],
        send: Callable[[Sequence[Envelope]], None],
    ) -> None:
        self.room = EngineRoom(peers, self)
        self._executor, self._workers = executor, workers
        self._snapshot, self._send = snapshot, send
        self._lent: dict[str, _Lent] = {}
        self._borrowing = RoomBorrowing(self.room, executor, workers, loan_ids, snapshot, send)
        executor.take_lent = self._take_lent

    @property
    def loans(self) -> Sequence[Loan]:
        """Return the loans that there are now."""
        return (*self.room.lent.values(), *self.room.borrowed.values())

    def take(self, message: Envelope | Members) -> None:
        """Take a message of another engine, of the gManager or of the supervisor."""
        if isinstance(message, Envelope):
            self._send(self.room.handle(message, self._executor.now))
            return
        lost, new = self.room.peers.update(message.members)
        for address in lost:
            self.room.lost(address)
        for member in new:
            self.room.joined(member.address)

    def tick(self) -> None:
        """Borrow what is lacking, ask for room back that is needed, and give back what is needless."""
        snapshot, now = self._snapshot(), self._executor.now
        self._send(self.room.tick(own_tokens(snapshot), now))
        self._borrowing.tick(snapshot)
        if snapshot.lent and (num_tokens := reclaimed_tokens(snapshot)):
            self._send(self.room.reclaim(num_tokens, now))

    def ask_room(self, loan: Loan) -> tuple[str, ...] | None:
        """See EngineHost."""
        return self._borrowing.ask(loan)

    def use_room(self, loan: Loan) -> None:
        """See EngineHost."""
        self._borrowing.use(loan)

    def drop_room(self, loan: Loan, reason: str) -> None:
        """See EngineHost."""
        self._borrowing.drop(loan, reason)

    def give_back(self, loan: Loan) -> None:
        """See EngineHost."""
        self._borrowing.give_back(loan)

    def lend(self, loan: Loan, question: LendRoom) -> None:
        """See EngineHost."""
        need = RoomNeed(loan.num_tokens, question.least_blocks * BLOCK_TOKENS, question.waited)
        found = room_to_lend(self._snapshot(), need)
        if found is None:
            self._send(self.room.decided(replace(loan, num_tokens=0)))
            return
        instance_id, num_tokens = found
        loan = replace(loan, num_tokens=num_tokens)
        self._lent[loan.loan_id] = _Lent(loan, question.configs, instance_id)
        reason = f"{num_tokens} tokens to engine {loan.debtor_id}: {loan.reason}"
        now = self._executor.now
        self._executor.post(RoomLent(now, loan.loan_id, instance_id, num_tokens, reason))

    def end(self, loan: Loan) -> None:
        """See EngineHost."""
        self._workers.end(loan.loan_id)

    def on_event(self, event: Event, applied: Applied, /) -> None:
        """Follow what happens to lent and to borrowed instances."""
        match event:
            case RoomLent() if (lent := self._lent.get(event.loan_id)) is not None:
                lent.has_room = bool(applied.instructions)
                if not lent.has_room:
                    self._refuse(lent)
            case InstanceLost() | InstanceLeft():
                for lent in [lent for lent in self._lent.values() if lent.instance_id == event.instance_id]:
                    self._lose(lent)
                if isinstance(event, InstanceLeft):
                    self._borrowing.see_left(event.instance_id)
            case _:
                pass

    def on_plan(
        self,
        _events: Sequence[Event],
        snapshot: Snapshot,
        _plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Let borrowed instances end that are empty."""
        drained_ids: Set[InstanceId] = snapshot.drained_ids & self._executor.members.borrowed.keys()
        if drained_ids:
            self._executor.members.end_drained(drained_ids)

    def _take_lent(self, report: SlotsLent) -> None:
        """Start the workers of a loan once all ranks have slots for it, if its debtor is still there."""
        if (lent := self._lent.get(report.loan_id)) is None:
            return
        lent.slots[report.tp_rank] = report.slots
        if len(lent.slots) < len(lent.configs):
            return
        loan = lent.loan
        self._send(self.room.decided(loan))
        slots = [lent.slots[rank] for rank in sorted(lent.slots)]
        if loan.loan_id not in self.room.lent:
            self._end(lent, "its debtor is gone")
            return
        try:
            self._workers.start(
                loan.loan_id,
                lent.instance_id,
                lent.configs,
                slots,
                lambda: self._end(lent, "the loan is over"),
            )
        except ConfigError:
            logger.exception("loan %s cannot begin", loan.loan_id)
            self._end(lent, "it could not begin")
            return
        logger.info(
            "instance %d lends %d tokens to engine %d", lent.instance_id, loan.num_tokens, loan.debtor_id
        )

    def _end(self, lent: _Lent, reason: str) -> None:
        """Let an instance have its room again, unless it was lost meanwhile."""
        loan_id = lent.loan.loan_id
        if self._lent.pop(loan_id, None) is not None:
            logger.info("instance %d has room again that it lent: %s", lent.instance_id, reason)
            self._executor.post(RoomReturned(self._executor.now, loan_id, lent.instance_id, reason))
        self._send(self.room.ended(loan_id))

    def _lose(self, lent: _Lent) -> None:
        """End a loan whose instance is gone: its room is no part of what comes after it."""
        if lent.loan.loan_id in self.room.lent:
            self._workers.end(lent.loan.loan_id)
        elif lent.has_room:  # else it is refused as soon as the state sees it
            self._refuse(lent)

    def _refuse(self, lent: _Lent) -> None:
        del self._lent[lent.loan.loan_id]
        self._send(self.room.decided(replace(lent.loan, num_tokens=0)))
