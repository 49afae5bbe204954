"""Several engines of one instance each whose managers lend room, in virtual time.

The managers are those of `loong.lending`, and talk by messages that take time and may be lost. An engine is
simpler than ours: requests begin in their order where their prompts have room, and decode together. An engine
that has no room for a block asks for a loan. If it gets none, its newest request begins again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.errors import ConfigError
from loong.core.placement import InstanceId
from loong.lending.global_manager import GlobalManager, Planning
from loong.lending.messages import Address, Envelope, MoveAllowed, SendBlocks
from loong.lending.peers import Peers
from loong.lending.rblocks import RBlockPool
from loong.lending.room_manager import RoomManager, Timing
from loong.scheduler.infinite.paper import StepModel
from loong.scheduler.tuning import LENT_BLOCK
from loong.workloads.request import WorkloadRequest

MEASURED_SHARE = 0.8
LEASE_STEPS = LENT_BLOCK  # a block of each request
SPARE_BLOCKS = 2  # for each request that decodes: prompts leave them free


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """The simulated cluster. Times are seconds, pools and loans blocks.

    Full instances borrow if `can_borrow`. A message takes `latency`, and is lost with the probability `loss`.
    The gManager is killed at `killed_at`, and another begins `restart_seconds` later.
    """

    num_engines: int
    pool: int
    heartbeat: float = 0.1
    planning: Planning = field(default_factory=Planning)
    can_borrow: bool = True
    latency: float = 5e-4
    loss: float = 0.0
    killed_at: float | None = None
    restart_seconds: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class LendingCounts:
    """The results of a run. Remote blocks, of those that leases read, are on other instances.

    A new gManager knows everything `failover_seconds` after it begins. Of all output tokens, `MEASURED_SHARE`
    are there at `measured_seconds`: the last requests leave engines idle.
    """

    num_output_tokens: int = 0
    seconds: float = 0.0
    num_measured_tokens: int = 0
    measured_seconds: float = 0.0
    num_allowed: int = 0
    num_refused: int = 0
    num_moved_blocks: int = 0
    num_preemptions: int = 0
    num_read_blocks: int = 0
    num_remote_blocks: int = 0
    num_messages: int = 0
    failover_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput while all engines have work."""
        return self.num_measured_tokens / self.measured_seconds if self.measured_seconds else 0.0


@dataclass(slots=True)
class _Request:
    request_id: str
    num_prompt: int  # blocks
    num_left: int  # tokens
    num_tries: int = 0

    @property
    def name(self) -> str:
        return f"{self.request_id}.{self.num_tries}"


@dataclass(slots=True)
class _Engine:
    manager: RoomManager
    pool: RBlockPool
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    is_busy: bool = False


_Event: TypeAlias = tuple[float, int, Callable[[float], None]]


class LendingRun:
    """One run of the engines. `counts` are its results."""

    def __init__(self, config: LendingConfig, cost_model: CostModel) -> None:
        self.config, self.counts = config, LendingCounts()
        self._cost_model, self._model = cost_model, StepModel(cost_model)
        self._random, self._order = Random(config.seed), count()  # noqa: S311
        self._events: list[_Event] = []
        self._epochs: dict[Address, int] = dict.fromkeys((*range(config.num_engines), None), 0)
        self._engines = [self._engine(i) for i in range(config.num_engines)]
        self._global: GlobalManager | None = self._new_global(0)
        self._restarted_at: float | None = None
        self._num_live = self._num_tokens = 0

    def run(self, requests: Iterable[WorkloadRequest]) -> LendingCounts:
        """Run until all requests have ended. Raises `ConfigError` for one that is longer than a pool."""
        for number, request in enumerate(requests):
            num_prompt = -(-request.num_prompt_tokens // LENT_BLOCK)
            num_blocks = num_prompt + request.num_output_tokens // LENT_BLOCK + SPARE_BLOCKS
            if num_blocks > self.config.pool:
                raise ConfigError(f"a request needs {num_blocks} blocks, but a pool has {self.config.pool}")
            arriving = _Request(f"r{number}", num_prompt, request.shape.num_output_tokens)
            self._at(request.arrival_time, partial(self._arrive, arriving))
            self._num_live += 1
            self._num_tokens += request.num_output_tokens
        self._at(0.0, self._tick)
        if self.config.killed_at is not None:
            self._at(self.config.killed_at, self._kill)
        while self._num_live and self._events:
            now, _, happen = heappop(self._events)
            self.counts.seconds = now
            happen(now)
        for engine in self._engines:
            self.counts.num_moved_blocks += engine.manager.moves.num_moved_blocks
        return self.counts

    def _engine(self, instance_id: InstanceId) -> _Engine:
        pool = RBlockPool(instance_id, self.config.pool)
        timing = Timing(self.config.heartbeat, promise=2.0, retry=0.5)
        manager = RoomManager(Peers([instance_id], 0, self._epochs), {instance_id: pool}, timing)
        return _Engine(manager, pool)

    def _new_global(self, epoch: int) -> GlobalManager:
        capacities = dict.fromkeys(range(self.config.num_engines), self.config.pool)
        return GlobalManager(Peers([None], epoch, self._epochs), capacities, self.config.planning)

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._order), happen))

    def _send(self, now: float, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            self.counts.num_messages += 1
            if self._random.random() < self.config.loss:
                continue
            seconds = self.config.latency
            if isinstance(envelope.body, SendBlocks):
                num_tokens = LENT_BLOCK * len(envelope.body.indexes)
                seconds += self._cost_model.migration_time(num_tokens, 0, 1)
            self._at(now + seconds, partial(self._deliver, envelope))

    def _deliver(self, envelope: Envelope, now: float) -> None:
        if isinstance(envelope.body, MoveAllowed):
            self.counts.num_allowed += envelope.body.is_allowed
            self.counts.num_refused += not envelope.body.is_allowed
        if envelope.receiver is not None:
            engine = self._engines[envelope.receiver]
            self._send(now, engine.manager.handle(envelope, now))
            self._begin(engine, now)
        elif self._global is not None:
            self._send(now, self._global.handle(envelope, now))

    def _tick(self, now: float) -> None:
        """Let managers tick, and the gManager plan, once a heartbeat."""
        for engine in self._engines:
            self._send(now, engine.manager.tick(now))
            self._begin(engine, now)
        if self._global is not None:
            self._send(now, self._global.plan())
        self._at(now + self.config.heartbeat, self._tick)
        is_known = all(engine.manager.reporting.has_restarted for engine in self._engines)
        if self._restarted_at is not None and is_known and self.counts.failover_seconds is None:
            self.counts.failover_seconds = now - self._restarted_at

    def _kill(self, now: float) -> None:
        self._global = None
        for engine in self._engines:
            engine.manager.lost(None, now)
        self._at(now + self.config.restart_seconds, self._restart)

    def _restart(self, now: float) -> None:
        self._epochs[None] += 1
        self._restarted_at, self._global = now, self._new_global(self._epochs[None])
        for engine in self._engines:
            engine.manager.joined(None, self._epochs[None])

    def _arrive(self, request: _Request, now: float) -> None:
        """Send a request where most memory is free, that of requests that wait counted as used."""
        engine = max(
            self._engines,
            key=lambda e: (e.pool.num_free - sum(r.num_prompt for r in e.waiting), -e.pool.instance_id),
        )
        engine.waiting.append(request)
        self._begin(engine, now)

    def _begin(self, engine: _Engine, now: float) -> None:
        """Begin a lease of an idle engine, if it has requests: with those that wait and find room."""
        if engine.is_busy:
            return
        num_new, instance_id = 0, engine.pool.instance_id
        while engine.waiting:
            request = engine.waiting[0]
            num_needed = request.num_prompt + SPARE_BLOCKS * (len(engine.running) + 1)
            if num_needed > engine.pool.num_free:
                self._borrow(engine, num_needed - engine.pool.num_free, now)
                break
            engine.manager.allocate(request.name, instance_id, request.num_prompt)
            engine.running.append(engine.waiting.popleft())
            num_new += request.num_prompt
        if engine.running:
            engine.is_busy = True
            self._at(now + self._lease_seconds(engine, num_new), partial(self._end, engine))

    def _lease_seconds(self, engine: _Engine, num_new: int) -> float:
        """Return the seconds of prompts and of a lease: remote blocks are read while local ones are."""
        homes = engine.manager.blocks.homes
        remote = Counter[InstanceId]()
        for request in engine.running:
            remote.update(homes[request.name].remote.values())
        num_here, batch_size = engine.pool.num_used, len(engine.running)
        seconds = self._model.seconds(batch_size, num_here)
        self.counts.num_read_blocks += num_here + remote.total()
        self.counts.num_remote_blocks += remote.total()
        if remote:
            longest = max(remote.values())
            seconds = max(seconds, self._model.seconds(batch_size, longest))
        terms = self._cost_model.prefill_terms(1)
        num_tokens = num_new * LENT_BLOCK
        prefill = terms.time(num_tokens, 0, num_tokens**2) if num_new else 0.0
        return LEASE_STEPS * seconds + prefill

    def _end(self, engine: _Engine, now: float) -> None:
        """End a lease: each request grows by a block, or ends. Without room, the last one begins again."""
        engine.is_busy = False
        for request in list(engine.running):
            num_tokens = min(LEASE_STEPS, request.num_left)
            if request not in engine.running:
                continue
            while not engine.manager.allocate(request.name, engine.pool.instance_id, 1):
                self._borrow(engine, SPARE_BLOCKS * len(engine.running), now)
                self._preempt(engine, now)
                if request not in engine.running:
                    break
            else:
                self._count(num_tokens, now)
                request.num_left -= num_tokens
                if not request.num_left:
                    engine.running.remove(request)
                    self._send(now, engine.manager.finish(request.name, now))
                    self._num_live -= 1
        self._begin(engine, now)

    def _count(self, num_tokens: int, now: float) -> None:
        """Count output tokens, and those of the time that is measured."""
        if self.counts.num_output_tokens < MEASURED_SHARE * self._num_tokens:
            self.counts.num_measured_tokens += num_tokens
            self.counts.measured_seconds = now
        self.counts.num_output_tokens += num_tokens

    def _preempt(self, engine: _Engine, now: float) -> None:
        request = engine.running.pop()
        num_blocks = engine.manager.blocks.homes[request.name].num_blocks
        self._send(now, engine.manager.finish(request.name, now))
        request.num_tries += 1
        request.num_prompt = num_blocks
        engine.waiting.appendleft(request)
        self.counts.num_preemptions += 1

    def _borrow(self, engine: _Engine, num_blocks: int, now: float) -> None:
        if not self.config.can_borrow:
            return
        instance_id = engine.pool.instance_id
        sent: Sequence[Envelope] = engine.manager.reclaim(instance_id, num_blocks, now)
        self._send(now, sent or engine.manager.borrow(instance_id, num_blocks, now))
