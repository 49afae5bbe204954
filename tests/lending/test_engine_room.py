"""Engines that lend each other room, while messages are lost, late and repeated, and processes are killed."""

from collections import Counter
from dataclasses import dataclass, field, replace

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loong.lending.engine_room import BLOCK_TOKENS, EngineRoom, Loan, RoomNeed, blocks_of
from loong.lending.global_manager import GlobalManager, Planning
from loong.lending.messages import Address, Envelope, LendRoom, Member, Members, decoded, encoded
from loong.lending.peers import Peers

NUM_ENGINES, CAPACITY, MAX_LOANS = 3, 40 * BLOCK_TOKENS, 2
engine_ids = st.integers(0, NUM_ENGINES - 1)
indexes = st.integers(0, 30)


@dataclass
class Host:
    """An engine of toy instances: room, and the loans whose workers run for it."""

    world: "World"
    engine_id: int
    num_used: int = 0
    undecided: dict[str, Loan] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)  # drained by the debtor or lost

    @property
    def room(self) -> EngineRoom:
        return self.world.rooms[self.engine_id]

    @property
    def num_lent(self) -> int:
        return sum(loan.num_tokens for loan in self.room.lent.values())

    def ask_room(self, _loan: Loan) -> tuple[str, ...] | None:
        return ("config",) if len(self.room.borrowed) < MAX_LOANS else None

    def use_room(self, loan: Loan) -> None:
        assert self.world.workers.get(loan.loan_id, loan) == replace(loan, since=0.0)

    def drop_room(self, loan: Loan, _reason: str) -> None:
        assert loan.loan_id not in self.room.borrowed

    def give_back(self, loan: Loan) -> None:
        self.world.workers.pop(loan.loan_id, None)

    def lend(self, loan: Loan, question: LendRoom) -> None:
        assert question.configs == ("config",)
        self.undecided[loan.loan_id] = loan

    def decide(self, loan: Loan) -> None:
        """Lend what there is."""
        free = CAPACITY - self.num_used - self.num_lent
        loan = replace(loan, num_tokens=min(free, loan.num_tokens) // BLOCK_TOKENS * BLOCK_TOKENS)
        self.world.send(self.room.decided(loan))
        if loan.loan_id in self.room.lent:
            self.world.workers[loan.loan_id] = replace(loan, since=0.0)

    def end(self, loan: Loan) -> None:
        self.world.workers.pop(loan.loan_id, None)

    def see_ends(self, now: float) -> None:
        """Notice the workers that have ended."""
        workers = self.world.workers
        for loan_id in [loan_id for loan_id in self.room.lent if loan_id not in workers]:
            self.world.send(self.room.ended(loan_id))
        for loan_id, loan in list(self.room.borrowed.items()):
            if loan_id not in workers and loan.creditor_id in self.room.peers.epochs:
                self.world.send(self.room.returned(loan_id, now))


class World(RuleBasedStateMachine):
    """Engines, a gManager, a supervisor that may be late, and messages on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs = Counter[Address](dict.fromkeys((None, *range(NUM_ENGINES)), 1))
        self.workers: dict[str, Loan] = {}  # processes of loans; they end with their creditor
        self.on_way: list[Envelope] = []
        self.is_managed = True
        self.hosts: dict[int, Host] = {}
        self.rooms: dict[int, EngineRoom] = {}
        for engine_id in range(NUM_ENGINES):
            self.start(engine_id)
        self.manager = GlobalManager(Peers((None,), 1, {}), {}, Planning(least_swap=2))
        for address in (None, *range(NUM_ENGINES)):
            self.tell(address)

    def start(self, engine_id: int) -> None:
        self.hosts[engine_id] = host = Host(self, engine_id)
        self.rooms[engine_id] = EngineRoom(Peers((engine_id,), self.epochs[engine_id], {}), host)

    def send(self, envelopes: list[Envelope]) -> None:
        for envelope in envelopes:
            message = decoded(encoded(envelope))
            assert isinstance(message, Envelope)
            self.on_way.append(message)

    def tell(self, address: Address) -> None:
        members = Members(tuple(Member(a, epoch, CAPACITY) for a, epoch in self.epochs.items()))
        if address is None:
            lost, new = self.manager.peers.update(members.members)
            for one in lost:
                self.manager.lost(one)
            for member in new:
                self.manager.joined(member.address, member.epoch, blocks_of(member.capacity))
            return
        room = self.rooms[address]
        lost, new = room.peers.update(members.members)
        for one in lost:
            room.lost(one)
        for member in new:
            room.joined(member.address)

    def deliver(self, envelope: Envelope) -> None:
        if envelope.receiver is None:
            if self.is_managed:
                self.send(self.manager.handle(envelope, self.now))
        else:
            self.send(self.rooms[envelope.receiver].handle(envelope, self.now))

    @rule(engine_id=engine_ids, num_tokens=st.integers(1, CAPACITY))
    def borrow(self, engine_id: int, num_tokens: int) -> None:
        self.send(self.rooms[engine_id].borrow(RoomNeed(num_tokens), self.now))

    @rule(engine_id=engine_ids, num_tokens=st.integers(1, CAPACITY), num_steps=st.integers(1, 4))
    def agree(self, engine_id: int, num_tokens: int, num_steps: int) -> None:
        """Come to a loan, or nearly: a question that is undecided, or an answer on its way or lost."""
        self.now += 3.0  # a search before that has been given up
        self.borrow(engine_id, num_tokens)
        self.deliver_all()
        for other in range(NUM_ENGINES) if num_steps > 1 else ():
            while self.hosts[other].undecided:
                self.decide(other)
        if num_steps == 3:
            self.deliver_all()
        elif num_steps == 4:
            self.on_way.clear()

    @rule(engine_id=engine_ids, num_tokens=st.integers(0, CAPACITY))
    def use(self, engine_id: int, num_tokens: int) -> None:
        host = self.hosts[engine_id]
        host.num_used = min(num_tokens, CAPACITY - host.num_lent)

    @rule(engine_id=engine_ids, num_tokens=st.integers(1, CAPACITY))
    def reclaim(self, engine_id: int, num_tokens: int) -> None:
        self.send(self.rooms[engine_id].reclaim(num_tokens, self.now))

    @rule(engine_id=engine_ids, index=indexes)
    def give_back(self, engine_id: int, index: int) -> None:
        if borrowed := list(self.rooms[engine_id].borrowed.values()):
            self.hosts[engine_id].give_back(borrowed[index % len(borrowed)])

    @rule(engine_id=engine_ids)
    def decide(self, engine_id: int) -> None:
        host = self.hosts[engine_id]
        if host.undecided:
            host.decide(host.undecided.pop(next(iter(host.undecided))))

    @rule(engine_id=engine_ids)
    def see_ends(self, engine_id: int) -> None:
        self.hosts[engine_id].see_ends(self.now)

    @rule(index=indexes, is_kept=st.booleans())
    def deliver_one(self, index: int, is_kept: bool) -> None:
        """Deliver any message. It may come again."""
        if self.on_way:
            index %= len(self.on_way)
            self.deliver(self.on_way[index] if is_kept else self.on_way.pop(index))

    @rule()
    def deliver_all(self) -> None:
        for _ in range(40):
            for envelope in self.on_way[:]:
                self.on_way.remove(envelope)
                self.deliver(envelope)

    @rule(index=indexes)
    def lose_message(self, index: int) -> None:
        if self.on_way:
            self.on_way.pop(index % len(self.on_way))

    @rule(seconds=st.floats(0.05, 1.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for engine_id, room in self.rooms.items():
            self.send(room.tick(self.hosts[engine_id].num_used, self.now))
        if self.is_managed:
            self.send(self.manager.plan())

    @rule(engine_id=engine_ids)
    def kill_engine(self, engine_id: int) -> None:
        """Its loans to others end with it. Others learn of it later."""
        self.epochs[engine_id] += 1
        self.workers = {i: loan for i, loan in self.workers.items() if loan.creditor_id != engine_id}
        self.start(engine_id)
        self.tell(engine_id)

    @rule()
    def kill_manager(self) -> None:
        self.epochs[None] += 1
        self.manager = GlobalManager(Peers((None,), self.epochs[None], {}), {}, Planning(least_swap=2))
        self.tell(None)

    @rule(address=st.one_of(st.none(), engine_ids))
    def tell_one(self, address: Address) -> None:
        self.tell(address)

    @invariant()
    def no_room_is_lent_twice(self) -> None:
        for engine_id, host in self.hosts.items():
            assert host.num_used + host.num_lent <= CAPACITY
            owners = {loan.creditor_id for loan in self.rooms[engine_id].lent.values()}
            assert owners <= {engine_id}
        for loan_id, loan in self.workers.items():
            assert self.rooms[loan.creditor_id].lent[loan_id].num_tokens == loan.num_tokens

    def teardown(self) -> None:
        """Once all messages come, both sides and the gManager agree on each loan."""
        for _ in range(12):
            for address in self.epochs:
                self.tell(address)
            for engine_id in range(NUM_ENGINES):
                while self.hosts[engine_id].undecided:
                    self.decide(engine_id)
            self.tick(3.0)
            self.deliver_all()
            for engine_id in range(NUM_ENGINES):
                self.see_ends(engine_id)
            self.deliver_all()
        lent = {
            i: (loan.debtor_id, loan.num_tokens) for r in self.rooms.values() for i, loan in r.lent.items()
        }
        borrowed = {
            loan_id: (engine_id, loan.num_tokens)
            for engine_id, room in self.rooms.items()
            for loan_id, loan in room.borrowed.items()
        }
        assert lent == borrowed
        assert lent.keys() == self.workers.keys()
        debts: Counter[tuple[int, int]] = Counter()
        for room in self.rooms.values():
            for loan in room.lent.values():
                debts[loan.debtor_id, loan.creditor_id] += blocks_of(loan.num_tokens)
        used = {i for i, host in self.hosts.items() if host.num_used}
        assert {k: n for k, n in self.manager.ledger.blocks.items() if k[0] in used} == {
            k: n for k, n in debts.items() if k[0] in used
        }


TestWorld = World.TestCase
TestWorld.settings = settings(examples(20, thorough=300), stateful_step_count=40, deadline=None)
