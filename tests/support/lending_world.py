"""Engines with managers in a world whose messages come late, twice, in any order, or never."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.global_manager import GlobalManager, Planning
from loong.lending.messages import Address, Envelope, decoded, encoded
from loong.lending.peers import Peers
from loong.lending.rblocks import RBlockPool
from loong.lending.room_manager import RoomManager, Timing

TIMING = Timing(heartbeat=1.0, promise=3.0, retry=1.0, memory=1e9)


@dataclass(frozen=True)
class Change:
    """A process that is lost, or has joined with an epoch: news that come to each other process in order."""

    address: Address
    epoch: int | None


@dataclass
class World:
    """Engines of one or two instances each, a gManager, messages `on_way`, and `news` of processes."""

    instances_of: dict[int, tuple[InstanceId, ...]]
    num_device: int = 8
    num_host: int = 2
    planning: Planning = field(default_factory=lambda: Planning(least_swap=1))
    now: float = 0.0
    on_way: list[Envelope] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.epoch = self.num_begun = 0
        self.epochs: dict[Address, int] = {i: 0 for ids in self.instances_of.values() for i in ids}
        self.epochs[None] = 0
        self.managers: dict[int, RoomManager] = {}
        self.news: dict[int | None, list[Change]] = {None: [], **{e: [] for e in self.instances_of}}
        for engine in self.instances_of:
            self.managers[engine] = self._room_manager(engine, 0)
        self.global_manager = self._global_manager(0)

    def _room_manager(self, engine: int, epoch: int) -> RoomManager:
        ids = self.instances_of[engine]
        pools = {i: RBlockPool(i, self.num_device, self.num_host) for i in ids}
        return RoomManager(Peers(ids, epoch, self.epochs), pools, TIMING)

    def _global_manager(self, epoch: int) -> GlobalManager:
        capacities = {i: self.num_device + self.num_host for i in self.epochs if i is not None}
        return GlobalManager(Peers([None], epoch, self.epochs), capacities, self.planning)

    def send(self, envelopes: "list[Envelope]") -> None:
        messages = [decoded(encoded(envelope)) for envelope in envelopes]
        self.on_way += [message for message in messages if isinstance(message, Envelope)]

    def engine_of(self, instance_id: InstanceId) -> int:
        return next(e for e, ids in self.instances_of.items() if instance_id in ids)

    def deliver(self, envelope: Envelope) -> None:
        if envelope.receiver is None:
            self.send(self.global_manager.handle(envelope, self.now))
        else:
            manager = self.managers[self.engine_of(envelope.receiver)]
            self.send(manager.handle(envelope, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for manager in self.managers.values():
            self.send(manager.tick(self.now))

    def plan(self) -> None:
        self.send(self.global_manager.plan())

    def kill_engine(self, engine: int) -> None:
        """Kill an engine's processes and start them again, empty; others hear of it later."""
        self.epoch += 1
        for instance_id in self.instances_of[engine]:
            self._announce(instance_id, engine)
        self.managers[engine] = self._room_manager(engine, self.epoch)
        self.news[engine].clear()  # it begins with all that is known

    def kill_global_manager(self) -> None:
        self.epoch += 1
        self._announce(None, None)
        self.global_manager = self._global_manager(self.epoch)
        self.news[None].clear()

    def _announce(self, address: Address, of: int | None) -> None:
        self.epochs[address] = self.epoch
        for process, changes in self.news.items():
            if process != of:
                changes += [Change(address, None), Change(address, self.epoch)]

    def hear(self, process: int | None) -> None:
        """Let a process hear the next of its news."""
        change = self.news[process].pop(0)
        if process is None and change.epoch is None:
            self.global_manager.lost(change.address)
        elif process is None:
            assert change.epoch is not None
            self.global_manager.joined(change.address, change.epoch, self.num_device + self.num_host)
        elif change.epoch is None:
            self.managers[process].lost(change.address, self.now)
        else:
            self.managers[process].joined(change.address, change.epoch)

    def moment(self, random: Random) -> None:
        """Let something happen: mostly to messages and blocks, rarely to processes."""
        now, requests = self.now, self.requests
        engine, manager = random.choice(list(self.managers.items()))
        home_id = random.choice(self.instances_of[engine])
        mine = [r for e, r in requests if e == engine]
        match random.choices(range(10), (40, 8, 10, 14, 6, 4, 12, 0.3, 0.1, 3))[0]:
            case 0:
                self.message(random)
            case 1:
                self.num_begun += 1
                if not manager.allocate(f"r{self.num_begun}", home_id, random.randint(1, 5)):
                    self.send(manager.borrow(home_id, 2, now))
                    self.send(manager.reclaim(home_id, 2, now))
            case 2 if mine:
                request_id = random.choice(mine)
                at = manager.blocks.homes[request_id].home_id
                if not manager.blocks.restore(request_id) or not manager.allocate(request_id, at, 1):
                    self.send(manager.borrow(at, 1, now))
            case 3 if mine:
                request_id, to = random.choice(mine), random.choice(list(self.epochs))
                at = manager.blocks.homes[request_id].home_id
                if to is not None:
                    self.send(manager.moves.start(request_id, random.randint(1, 3), at, to, now))
            case 4 if mine:
                self.send(manager.finish(random.choice(mine), now))
            case 5:
                self.plan()
            case 6:
                self.tick(random.choice([0.2, 0.5, 1.0, 3.5]))
            case 7:
                self.kill_engine(engine)
            case 8:
                self.kill_global_manager()
            case 9:
                heard = [process for process, news in self.news.items() if news]
                if heard:
                    self.hear(random.choice(heard))
            case _:
                pass

    def message(self, random: Random) -> None:
        """Deliver a message on its way: perhaps not the first, perhaps twice, perhaps never."""
        if not self.on_way:
            return
        at = 0 if random.random() < 0.5 else random.randrange(len(self.on_way))
        fate = random.random()
        envelope = self.on_way[at] if fate < 0.2 else self.on_way.pop(at)
        if fate < 0.9:
            self.deliver(envelope)

    @property
    def requests(self) -> list[tuple[int, RequestId]]:
        """Return the live requests, each with its engine."""
        return [(engine, r) for engine, m in self.managers.items() for r in m.blocks.homes]

    def settle(self) -> None:
        """Let everybody hear everything, and time pass, until nothing is in flight."""
        while any(self.news.values()):
            for process, changes in self.news.items():
                if changes:
                    self.hear(process)
        for _ in range(40):
            while self.on_way:
                self.deliver(self.on_way.pop(0))
            if self.is_quiet:
                return
            self.tick(1.0)
        raise AssertionError("the managers do not come to rest")

    @property
    def is_quiet(self) -> bool:
        return not self.on_way and all(
            m.reporting.is_confirmed
            and not (m.moves.open or m.promises.open or m.releases.open or m.borrowings.open)
            for m in self.managers.values()
        )

    def pools(self) -> Iterator[RBlockPool]:
        for manager in self.managers.values():
            yield from manager.blocks.pools.values()

    def check_owners(self) -> None:
        """Check that no room has two blocks, and that each block of a request is where its home says.

        What was at an instance that is lost may be gone.
        """
        for engine, manager in self.managers.items():
            for pool in manager.blocks.pools.values():
                check_pool(pool, manager)
            for request_id, request in manager.blocks.homes.items():
                local = set(manager.blocks.pools[request.home_id].indexes_of(request_id))
                parts = [local, set(request.remote), request.missing]
                assert sum(map(len, parts)) == request.num_blocks == len(set().union(*parts))
                for index, place in request.remote.items():
                    keeper = self.managers[self.engine_of(place)]
                    is_there = manager.peers.epochs.get(place) == self.epochs[place]
                    has_it = index in keeper.blocks.pools[place].indexes_of(request_id)
                    assert has_it or not is_there, (engine, request_id, index, place)

    def check_settled(self) -> None:
        """Check that the gManager's map is what pools hold, and its ledger what homes say is lent."""
        held = {
            (request_id, pool.instance_id): len(pool.indexes_of(request_id))
            for pool in self.pools()
            for request_id in pool.request_ids
        }
        entries = self.global_manager.entries
        assert {key: entry.num_blocks for key, entry in entries.items()} == held
        lent: dict[tuple[InstanceId, InstanceId], int] = {}
        for manager in self.managers.values():
            for request_id, request in manager.blocks.homes.items():
                for index, place in request.remote.items():
                    assert index in self.managers[self.engine_of(place)].blocks.pools[place].indexes_of(
                        request_id
                    )
                    lent[request.home_id, place] = lent.get((request.home_id, place), 0) + 1
        assert dict(self.global_manager.ledger.blocks) == lent
        homes = sum(
            request.num_blocks - len(request.missing)
            for m in self.managers.values()
            for request in m.blocks.homes.values()
        )
        assert homes == sum(held.values())
        for pool in self.pools():
            assert pool.num_free + pool.num_used == pool.capacity


def check_pool(pool: RBlockPool, manager: RoomManager) -> None:
    """Check that used, free and promised rooms of a pool are all its rooms, each once."""
    used = [block.room for r in pool.request_ids for block in pool.blocks_of(r)]
    promised = [
        room
        for promise in manager.promises.open.values()
        if promise.destination_id == pool.instance_id
        for room in promise.rooms
    ]
    assert len({*used, *promised}) == len(used) + len(promised)
    assert len(used) + len(promised) + pool.num_free == pool.capacity
