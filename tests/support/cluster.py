"""Real worker processes for tests, under any policy."""

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

from simulated_hosts import SimulatedHosts, simulated_hosts
from warm_commands import warm_fork_servers

from loong.core.cluster_history import ClusterHistory
from loong.core.cost.cost_model import CostModel
from loong.core.errors import ClusterError
from loong.core.events import Drained, Event, ProducedToken
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, Request, RequestId
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.engine.client import EngineLimits
from loong.engine.cluster_size import NO_MEMORY, MemoryNumbers
from loong.engine.engine import Engine
from loong.engine.health import Health
from loong.engine.loop import Scheduling
from loong.engine.scaling import Scaling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import local_workers
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.launcher.cluster.workers import workers_of
from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.log import DecisionLog
from loong.observability.timeline import Timeline
from loong.processes.fork_server import ForkServer
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import Policy
from loong.server.openai.token_stream import TokenStream
from loong.state.cluster_state import ClusterState

Outputs: TypeAlias = dict[RequestId, list[ProducedToken]]


def plan_nothing(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
    """Wait."""
    return IterationPlan()


@dataclass(frozen=True, slots=True)
class After:
    """The moment at which a request of the same run has produced `num_tokens` tokens, or has ended."""

    request_id: RequestId
    num_tokens: int


class Recorder:
    """An `Executor` that keeps its instructions and events, in order."""

    def __init__(self, executor: WorkersExecutor) -> None:
        self._executor = executor
        self.log: list[Event | Instruction] = []

    async def next_events(self) -> Sequence[Event]:
        """Return the executor's next events."""
        events = await self._executor.next_events()
        self.log += events
        return events

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Let the executor carry these out."""
        reported = tuple(instructions)
        self.log += reported
        self._executor.submit(reported)


class Cluster:
    """A running engine whose policy each test chooses.

    `log` is what happened since the last run began, and `lines` are those of its decision log.
    `prompt_logprobs` are those of its requests that asked for them.
    """

    def __init__(
        self,
        executor: WorkersExecutor,
        instances: tuple[ElasticInstance, ...],
        max_instances: int,
        hosts: SimulatedHosts | None = None,
        *,
        memory: MemoryNumbers = NO_MEMORY,
        keeps_prefixes: bool = False,
        windows: WindowMemory | None = None,
    ) -> None:
        self.full_ids = tuple(i.instance_id for i in instances if i.kind is InstanceKind.FULL)
        self.host_ids = tuple(i.instance_id for i in instances if i.kind is InstanceKind.HOST)
        self.memory_ids = tuple(i.instance_id for i in instances if i.kind is InstanceKind.ATTENTION)
        self._hosts = hosts
        self._state = ClusterState(instances, keeps_prefixes=keeps_prefixes, windows=windows)
        self._recorder = Recorder(executor)
        self._policy: Policy = plan_nothing
        self._num_expected = 0
        self._clients: _Clients | None = None
        self._planned = asyncio.Event()
        self.prompt_logprobs: dict[RequestId, PromptLogprobs] = {}
        self._loop = asyncio.get_running_loop()
        timeline = Timeline()
        self.lines: list[Line] = []
        log = DecisionLog(None, listeners=[lambda line, _: self.lines.append(line)])
        scheduling = Scheduling(self._state, self._plan, WorkCostModel(), self._recorder, (timeline, log))
        self.observe, self.executor = scheduling.observe, executor
        capacity = sum(instance.kv_capacity for instance in instances)
        kv_capacity, num_instances = instances[0].kv_capacity, len(self.full_ids)
        scaling = Scaling(
            executor.members,
            num_instances,
            max_instances,
            kv_capacity,
            lambda _: None,
            lambda instance_ids: sum(kv_capacity for _ in instance_ids),
            memory,
        )
        limits = EngineLimits(capacity, capacity, 1 << 30)
        self._engine = Engine(scheduling, executor, limits, timeline, scaling)
        self.serving = asyncio.create_task(self._engine.run())
        self.serving.add_done_callback(lambda _: self._planned.set())

    @property
    def log(self) -> Sequence[Event | Instruction]:
        """Events and instructions in their order."""
        return self._recorder.log

    @property
    def history(self) -> ClusterHistory:
        """Return the last batches of all runs."""
        return self._engine.history()

    def run(
        self,
        requests: Sequence[Request],
        policy: Policy,
        *,
        arrivals: Mapping[RequestId, After] | None = None,
        leaving: Mapping[RequestId, int] | None = None,
        timeout: float = 30,
    ) -> Outputs:
        """Return all tokens of all requests; check that every slot is free at the end.

        Requests arrive before the first plan, unless `arrivals` says when. A choice in `leaving` is aborted
        after that number of tokens, at least one.
        """
        self._raise_failure()
        clients = _Clients(self._engine, requests, arrivals or {}, leaving or {})
        work = asyncio.run_coroutine_threadsafe(self._serve(clients, policy, timeout), self._loop)
        try:
            return work.result(timeout + 5)
        except ClusterError:
            self._raise_failure()
            raise
        except TimeoutError as error:
            happened = "\n".join(map(str, self.log[-8:]))
            raise AssertionError(f"stuck after\n{happened}\nin {self._engine.snapshot()}") from error

    @property
    def health(self) -> Health:
        """The health of the engine now."""
        return self._engine.health()

    @property
    def snapshot(self) -> Snapshot:
        """The cluster now."""
        return self._engine.snapshot()

    def wait_until(self, holds: Callable[[Snapshot], bool], timeout: float = 30) -> None:
        """Return once `holds` is true of the cluster after some plan."""
        self._raise_failure()
        asyncio.run_coroutine_threadsafe(self._wait_until(holds, timeout), self._loop).result(timeout + 5)

    async def _wait_until(self, holds: Callable[[Snapshot], bool], timeout: float) -> None:
        async with asyncio.timeout(timeout):
            while not holds(self._engine.snapshot()):
                self._planned.clear()
                await self._planned.wait()
                self._raise_failure()

    def scale(self, num_instances: int, num_memory: int | None = None) -> None:
        """Begin to change the number of instances, from any thread."""
        self._loop.call_soon_threadsafe(self._engine.scale, num_instances, num_memory)

    def abort(self, request_id: RequestId) -> None:
        """Let the client of a request go now; for policies, which run in the engine's thread."""
        assert self._clients is not None
        self._clients.leave(request_id)

    def lose_host(self, host_id: int) -> None:
        """End a host of several with all its workers; for policies, which run in the engine's thread."""
        assert self._hosts is not None
        self._hosts.lose(host_id)

    def add_host(self, host_id: int) -> None:
        """Start a lost host again."""
        assert self._hosts is not None
        self._loop.call_soon_threadsafe(self._hosts.add, host_id)

    def stop(self) -> None:
        """Let the engine end."""
        with suppress(RuntimeError):  # it has ended before
            self._loop.call_soon_threadsafe(self.executor.post, Drained())

    async def _serve(self, clients: "_Clients", policy: Policy, timeout: float) -> Outputs:
        self._policy, self._clients = policy, clients
        self._recorder.log.clear()
        self.lines.clear()
        stats = self._engine.snapshot().stats
        self._num_expected = stats.num_arrived + clients.num_first
        num_ended = stats.num_ended + sum(request.num_choices for request in clients.requests)
        async with asyncio.timeout(timeout):
            outputs = await clients.outputs()
            self.prompt_logprobs = clients.prompt_logprobs
            await self._wait_until(lambda s: s.stats.num_ended >= num_ended and not s.copies, timeout)
        instances = self._engine.snapshot().instances
        assert all(instance.kv_used == 0 for instance in instances), instances
        return outputs

    def _plan(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        self._state.check()
        self._planned.set()
        if snapshot.stats.num_arrived < self._num_expected:
            return IterationPlan()
        return self._policy(snapshot, cost_model)

    def _raise_failure(self) -> None:
        if self.serving.done() and (failure := self.serving.exception()) is not None:
            raise failure


class _Clients:
    """The clients of one run."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        arrivals: Mapping[RequestId, After],
        leaving: Mapping[RequestId, int],
    ) -> None:
        self.requests = requests
        self._engine, self._arrivals, self._leaving = engine, arrivals, leaving
        self._moments = {moment: asyncio.Event() for moment in arrivals.values()}
        self._outputs: Outputs = {choice_id: [] for r in requests for choice_id in r.choice_ids}
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self.prompt_logprobs: dict[RequestId, PromptLogprobs] = {}

    @property
    def num_first(self) -> int:
        """Requests that wait for no other, each choice counted."""
        return sum(r.num_choices for r in self.requests if r.request_id not in self._arrivals)

    async def outputs(self) -> Outputs:
        """Return the tokens that each client got."""
        self._tasks = {r.request_id: asyncio.create_task(self._collect(r)) for r in self.requests}
        await asyncio.gather(*self._tasks.values())
        return self._outputs

    def leave(self, request_id: RequestId) -> None:
        """Let a client go."""
        self._tasks[request_id].cancel()

    async def _collect(self, request: Request) -> None:
        request_id = request.request_id
        if (arrival := self._arrivals.get(request_id)) is not None:
            await self._moments[arrival].wait()
        with suppress(asyncio.CancelledError), TokenStream(self._engine, request) as stream:
            async for token in stream:
                if (found := stream.prompt_logprobs) is not None:
                    self.prompt_logprobs[request_id] = found
                tokens = self._outputs[token.request_id]
                tokens.append(token)
                self._pass(After(token.request_id, len(tokens)))
                if self._leaving.get(token.request_id) == len(tokens):
                    stream.abort(token.request_id, FinishReason.ABORT)
        for moment in self._moments:
            if moment.request_id == request_id:
                self._pass(moment)

    def _pass(self, moment: After) -> None:
        if moment in self._moments:
            self._moments[moment].set()


@contextmanager
def running_cluster(
    config: ClusterConfig,
    believed: tuple[ElasticInstance, ...] | None = None,
    lookahead: LookaheadMargin | None = None,
    *,
    backoff: Backoff | None = None,
    fork_server: ForkServer | None = None,
    keeps_prefixes: bool = False,
) -> Iterator[Cluster]:
    """A cluster in a thread of its own, so that one serves many tests; ends are predicted by `lookahead`.

    The engine takes its instances for `believed`, if that is given: it may be wrong about their room. With
    `backoff`, lost instances are started again. `fork_server` starts the workers (None: one for all tests).
    Several hosts are simulated. With `keeps_prefixes`, KV stays when its request has ended.
    """
    started: Future[Cluster] = Future()
    instances = config.instances if believed is None else believed
    work = partial(
        _run,
        config,
        instances,
        lookahead,
        backoff,
        fork_server or shared_fork_server(),
        started,
        keeps_prefixes,
    )
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    with ExitStack() as ending:
        ending.callback(thread.join)
        cluster = started.result()
        ending.callback(cluster.stop)
        yield cluster


@cache
def shared_fork_server() -> ForkServer:
    with warm_fork_servers():
        server = worker_fork_server()
    atexit.register(server.close)
    return server


async def _run(
    config: ClusterConfig,
    instances: tuple[ElasticInstance, ...],
    lookahead: LookaheadMargin | None,
    backoff: Backoff | None,
    fork_server: ForkServer,
    started: Future[Cluster],
    keeps_prefixes: bool,
) -> None:
    new_cluster = partial(
        Cluster, memory=config.memory_numbers, keeps_prefixes=keeps_prefixes, windows=config.windows
    )
    try:
        if config.num_hosts > 1:
            with simulated_hosts(config) as hosts:
                async with workers_of(config, hosts, lookahead, backoff=backoff) as executor:
                    await _serve(new_cluster(executor, instances, config.most_instances, hosts), started)
        else:
            async with local_workers(config, lookahead, fork_server, backoff=backoff) as executor:
                await _serve(new_cluster(executor, instances, config.most_instances), started)
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


async def _serve(cluster: Cluster, started: Future[Cluster]) -> None:
    started.set_result(cluster)
    await asyncio.wait([cluster.serving])
