"""Two engines with real workers, which lend each other room, and their gManager, in one event loop.

Those of hosts "ray" have a simulated host each.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial

from cluster import Cluster, shared_fork_server
from simulated_hosts import simulated_hosts

from loong.core.snapshot import Snapshot
from loong.engine.room_lending import RoomLending
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import local_workers
from loong.launcher.cluster.workers import workers_of
from loong.lending.engine_room import RoomNeed, blocks_of
from loong.lending.global_manager import GlobalManager, Planning
from loong.lending.messages import Address, Envelope, Member, Members, decoded, encoded
from loong.lending.peers import Peers

AT_ONCE = Backoff(first=0.0, longest=0.0, max_failures=1000)


class LendingEngines:
    """The engines of some configs, and what they say to each other. They act only as `turn` lets them."""

    def __init__(self, clusters: Sequence[Cluster], configs: Sequence[ClusterConfig]) -> None:
        self.clusters, self._loop = clusters, asyncio.get_running_loop()
        self.members: dict[Address, Member] = {None: Member(None, 1)}
        self.manager = GlobalManager(Peers((None,), 1, {}), {}, Planning(least_swap=1))
        self.lendings = [self._lending(i, configs[i]) for i in range(len(clusters))]
        for i, config in enumerate(configs):
            self.members[i] = Member(i, 1, config.num_instances * config.kv_capacity)
        self.tell()

    def _lending(self, engine_id: int, config: ClusterConfig) -> RoomLending:
        cluster = self.clusters[engine_id]
        restarts = cluster.executor.restarts
        assert restarts is not None
        assert restarts.room is not None
        peers = Peers((engine_id,), 1, {})
        lending = RoomLending(
            peers, cluster.executor, restarts.room, config.loan_ids, lambda: cluster.snapshot, self._send
        )
        cluster.observe(lending)
        return lending

    def call(self, work: Callable[[], None]) -> None:
        """Do something in the loop of the engines, and return when it is done."""

        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def turn(self) -> None:
        """Let all say what is due, and nothing else."""
        for lending, cluster in zip(self.lendings, self.clusters, strict=True):
            self._send(lending.room.tick(0, cluster.executor.now))

    def swap(self) -> None:
        """Let the gManager swap debts along cycles home, once every engine has reported its KV."""
        for lending, cluster in zip(self.lendings, self.clusters, strict=True):
            self._send(lending.room.tick(1, cluster.executor.now))

        def tick() -> None:
            for lending in self.lendings:
                lending.tick()

        self._loop.call_later(0.05, lambda: self._send(self.manager.plan()))
        self._loop.call_later(0.1, tick)

    def tell(self) -> None:
        """Tell all who is there."""
        message = Members(tuple(self.members.values()))
        lost, new = self.manager.peers.update(message.members)
        for address in lost:
            self.manager.lost(address)
        for member in new:
            self.manager.joined(member.address, member.epoch, blocks_of(member.capacity))
        for address in self.members:
            if address is not None:
                self.lendings[address].take(message)

    def lose(self, engine_id: int) -> None:
        """Let all others believe that an engine is gone."""
        del self.members[engine_id]
        self.call(self.tell)

    def borrow(self, engine_id: int, num_tokens: int) -> None:
        """Let an engine borrow room, and wait for it."""
        lending, cluster = self.lendings[engine_id], self.clusters[engine_id]

        self.call(self.turn)
        self.call(lambda: self._send(lending.room.borrow(RoomNeed(num_tokens), cluster.executor.now)))
        cluster.wait_until(lambda snapshot: bool(snapshot.memory_pools))

    def give_back(self, engine_id: int) -> None:
        """Let an engine give back what it has borrowed, and wait until nothing is lent."""
        self.call(partial(self._give_back, engine_id))
        self.wait_until_returned()

    def give_back_soon(self, engine_id: int) -> None:
        """Let an engine begin to give back what it has borrowed. For policies, which must not wait."""
        self._loop.call_soon(self._give_back, engine_id)

    def _give_back(self, engine_id: int) -> None:
        lending = self.lendings[engine_id]
        for loan in list(lending.room.borrowed.values()):
            lending.give_back(loan)
        lending.tick()

    def wait_until_returned(self) -> None:
        """Return when nothing is lent."""

        def has_all(snapshot: Snapshot) -> bool:
            return not snapshot.lent and not snapshot.memory_pools

        for cluster in self.clusters:
            cluster.wait_until(has_all)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let engines lend and borrow by what their requests need, meanwhile."""
        handles: list[asyncio.TimerHandle] = []

        def act() -> None:
            for lending in self.lendings:
                lending.tick()
            handles[:] = [self._loop.call_later(0.05, act)]

        self.call(act)
        try:
            yield
        finally:
            self.call(lambda: handles[0].cancel())

    def _send(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            self._loop.call_soon(self._deliver, encoded(envelope))

    def _deliver(self, frame: bytes) -> None:
        envelope = decoded(frame)
        assert isinstance(envelope, Envelope)
        if envelope.receiver is None:
            self._send(self.manager.handle(envelope, 0.0))
        elif envelope.receiver in self.members:
            self.lendings[envelope.receiver].take(envelope)


@contextmanager
def lending_engines(*configs: ClusterConfig) -> Iterator[LendingEngines]:
    """Run engines in a thread of their own."""
    started: Future[LendingEngines] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_run(configs, started)))
    thread.start()
    with ExitStack() as ending:
        ending.callback(thread.join)
        engines = started.result()
        for cluster in engines.clusters:
            ending.callback(cluster.stop)
        yield engines


async def _run(configs: Sequence[ClusterConfig], started: Future[LendingEngines]) -> None:
    try:
        async with AsyncExitStack() as stack:
            clusters = []
            for engine_id, config in enumerate(configs):
                executor = await stack.enter_async_context(_workers(config, engine_id))
                clusters.append(Cluster(executor, config.instances, config.most_instances))
            started.set_result(LendingEngines(clusters, configs))
            await asyncio.wait([cluster.serving for cluster in clusters])
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


@asynccontextmanager
async def _workers(config: ClusterConfig, engine_id: int) -> AsyncIterator[WorkersExecutor]:
    if config.hosts == "local":
        async with local_workers(config, fork_server=shared_fork_server(), backoff=AT_ONCE) as executor:
            yield executor
        return
    with simulated_hosts(config, first=engine_id) as hosts:
        async with workers_of(config, hosts, backoff=AT_ONCE) as executor:
            yield executor
