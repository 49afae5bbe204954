"""The gManager: it knows placements by heartbeats, keeps the debt ledger, and proposes moves.

Its view is always stale. So it only proposes: rManagers decide. What they refuse waits for the next round.
It may die. Its successor learns everything from heartbeats, except since when and why there are debts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.cycles import swaps
from loong.lending.greedy import DecodeModel, InstanceLoad, Thresholds, propose
from loong.lending.ledger import Debt, DebtLedger, LoanReason, candidates
from loong.lending.messages import (
    MAX_CREDITORS,
    Address,
    AskCreditors,
    Creditors,
    Envelope,
    Heartbeat,
    HeartbeatSeen,
    MoveKVCache,
    RequestPlacementEntry,
)
from loong.lending.peers import Peers
from loong.lending.reporting import Key

MAX_JOINING = 256  # requests that are thought to wait, where some are
CommunicationCost: TypeAlias = Callable[[InstanceId, InstanceId], float]


@dataclass(frozen=True, slots=True)
class Planning:
    """The rules of the gManager: Algorithm 1 if there is a `model`, and DGFM if there is a `least_swap`.

    Heartbeats do not say what waits. With `joining_blocks`, requests of this size join a debtor in the room
    that it frees, as many as fit; else none does.
    """

    model: DecodeModel | None = None
    thresholds: Thresholds = field(default_factory=lambda: Thresholds(inf, 0.8))
    least_swap: int | None = None
    joining_blocks: int | None = None


def equally_near(_debtor: InstanceId, _creditor: InstanceId) -> float:
    """Return the cost of communication where it is the same between all instances."""
    return 0.0


class GlobalManager:
    """The map of all placements, and the ledger that follows from it."""

    def __init__(
        self,
        peers: Peers,
        capacities: Mapping[InstanceId, int],
        planning: Planning | None = None,
        communication_cost: CommunicationCost = equally_near,
    ) -> None:
        self.peers, self.capacities = peers, dict(capacities)
        self.entries: dict[Key, RequestPlacementEntry] = {}
        self.ledger = DebtLedger()
        self._planning, self._cost = planning or Planning(), communication_cost
        self._last_heartbeat: dict[Address, int] = {}
        self._reasons: dict[Key, LoanReason] = {}
        self._borrower_ids = set[InstanceId]()

    def handle(self, envelope: Envelope, now: float) -> list[Envelope]:
        """Take a message, and return the answer.

        A heartbeat is not confirmed if it is older than the last one. Nor is it while this manager has yet to
        hear that an instance of its engine was lost: it would forget what is new with what is lost.
        """
        if not self.peers.accepts(envelope):
            return []
        body = envelope.body
        if isinstance(body, Heartbeat):
            is_old = envelope.number <= self._last_heartbeat.get(envelope.sender, 0)
            epochs = {self.peers.epochs.get(entry.inst_id) for entry in body.entries}
            if is_old or epochs - {envelope.sender_epoch}:
                return []
            self._last_heartbeat[envelope.sender] = envelope.number
            self._update(body.entries, now)
            return self.peers.answer(envelope, HeartbeatSeen())
        if isinstance(body, AskCreditors) and envelope.sender is not None:
            self._borrower_ids.add(envelope.sender)
            asked = self.creditors_for(envelope.sender)[:MAX_CREDITORS]
            return self.peers.answer(envelope, Creditors(asked))
        return []

    def creditors_for(self, debtor_id: InstanceId) -> tuple[InstanceId, ...]:
        """Return the creditors that a debtor asks in turn."""
        rooms = {i: self.capacities[i] - used for i, used in self._used().items()}
        return candidates(debtor_id, rooms, lambda creditor_id: self._cost(debtor_id, creditor_id))

    def plan(self) -> list[Envelope]:
        """Return the moves of one round: swaps home, and those of Algorithm 1."""
        sent, planning = list[Envelope](), self._planning
        if planning.least_swap is not None:
            for swap in swaps(self.ledger.blocks, planning.least_swap):
                for debtor_id, creditor_id in swap.edges:
                    sent += self._homewards(debtor_id, creditor_id, swap.num_blocks)
        if planning.model is not None:
            waiting = [planning.joining_blocks] * MAX_JOINING if planning.joining_blocks else []
            for found in propose(self.loads(), waiting, planning.model, planning.thresholds):
                self._reasons[found.request_id, found.creditor_id] = LoanReason.THROUGHPUT
                sent += self._move(found.request_id, found.num_blocks, found.debtor_id, found.creditor_id)
        return sent

    def loads(self) -> list[InstanceLoad]:
        """Return the load of each instance, as far as its last heartbeats say."""
        used, local = self._used(), Counter[InstanceId]()
        longest: dict[InstanceId, RequestPlacementEntry] = {}
        lent: dict[InstanceId, Counter[InstanceId]] = {i: Counter() for i in self.capacities}
        hosted = Counter[InstanceId]()
        for debt in self.ledger.debts.values():
            hosted[debt.creditor_id] += debt.num_blocks
            lent[debt.debtor_id][debt.creditor_id] += debt.num_blocks
        for entry in self.entries.values():
            if entry.local:
                local[entry.inst_id] += 1
                known = longest.get(entry.inst_id)
                if known is None or (entry.num_blocks, entry.req_id) > (known.num_blocks, known.req_id):
                    longest[entry.inst_id] = entry
        return [
            InstanceLoad(
                i,
                local[i],
                used[i],
                max(0, capacity - used[i]),
                used[i],
                capacity,
                longest[i].req_id if i in longest else None,
                longest[i].num_blocks - 1 if i in longest else 0,
                lent[i],
                hosted[i],
            )
            for i, capacity in self.capacities.items()
        ]

    def joined(self, address: Address, epoch: int, capacity: int = 0) -> None:
        """Know a new process, and the room of an instance."""
        self.peers.joined(address, epoch)
        if address is not None:
            self.capacities[address] = capacity
            self._last_heartbeat.pop(address, None)
            self._borrower_ids.discard(address)

    def lost(self, address: Address) -> None:
        """Forget an instance and its debts. What others kept for it they report as gone."""
        self.peers.lost(address)
        if address is not None:
            self.capacities.pop(address, None)
            self.entries = {k: e for k, e in self.entries.items() if e.inst_id != address}
            self.ledger = self.ledger.without(address)

    def _used(self) -> Counter[InstanceId]:
        used = Counter(dict.fromkeys(self.capacities, 0))
        for entry in self.entries.values():
            used[entry.inst_id] += entry.num_blocks
        return used

    def _update(self, entries: Sequence[RequestPlacementEntry], now: float) -> None:
        """Change the map, and then the debts of the requests that have changed."""
        for entry in entries:
            key = entry.req_id, entry.inst_id
            if entry.num_blocks:
                self.entries[key] = entry
            else:
                self.entries.pop(key, None)
        for request_id in dict.fromkeys(entry.req_id for entry in entries):
            self._update_debts(request_id, now)

    def _update_debts(self, request_id: RequestId, now: float) -> None:
        of_request = [self.entries.get((request_id, i)) for i in self.capacities]
        homes = [entry.inst_id for entry in of_request if entry is not None and entry.local]
        for instance_id, entry in zip(self.capacities, of_request, strict=True):
            is_debt = entry is not None and not entry.local and bool(homes)
            num_blocks = entry.num_blocks if entry is not None and is_debt else 0
            home_id = homes[0] if homes else instance_id
            usual = LoanReason.FULL if home_id in self._borrower_ids else LoanReason.UNKNOWN
            reason = self._reasons.get((request_id, instance_id), usual)
            debt = Debt(request_id, home_id, instance_id, num_blocks, now, reason)
            self.ledger = self.ledger.with_debt(debt)
            if not any(of_request):
                self._reasons.pop((request_id, instance_id), None)

    def _homewards(self, debtor_id: InstanceId, creditor_id: InstanceId, num_blocks: int) -> list[Envelope]:
        """Return the moves home of blocks that a creditor keeps, of the largest debts first."""
        debts = [
            debt
            for debt in self.ledger.debts.values()
            if (debt.debtor_id, debt.creditor_id) == (debtor_id, creditor_id)
        ]
        sent = list[Envelope]()
        for debt in sorted(debts, key=lambda debt: (-debt.num_blocks, debt.request_id)):
            num_moved = min(num_blocks, debt.num_blocks)
            if num_moved:
                sent += self._move(debt.request_id, num_moved, creditor_id, debtor_id)
            num_blocks -= num_moved
        return sent

    def _move(
        self, request_id: RequestId, num_blocks: int, source_id: InstanceId, destination_id: InstanceId
    ) -> list[Envelope]:
        body = MoveKVCache(request_id, num_blocks, destination_id)
        return self.peers.message(None, source_id, self.peers.new_number(), body)
