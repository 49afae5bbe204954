"""Whole runs in virtual time, by the loop that serves real clusters."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from loong.core.cost.cost_model import CostModel
from loong.core.events import Event, ProducedToken, TokensProduced
from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.core.plan import IterationPlan
from loong.core.request import Request, SamplingParams
from loong.core.snapshot import ClusterStats, Snapshot
from loong.engine.loop import Scheduling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST, WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.state.cluster_state import ClusterState

MAX_EVENTS = 200_000


@dataclass
class Run:
    """The results of a run. Times are virtual."""

    tokens: dict[str, list[ProducedToken]] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    plans: list[tuple[Snapshot, IterationPlan]] = field(default_factory=list)
    stats: ClusterStats = field(default_factory=ClusterStats)
    ended_at: float = 0.0

    def ttft(self, request: Request) -> float:
        """Return seconds from arrival to the first token."""
        return self.token_times[request.request_id][0] - request.arrival_time


def instances_with(capacities: Iterable[int], serves: Service = Service.ALL) -> tuple[ElasticInstance, ...]:
    """Return instances 0, 1, ... with these pools."""
    return tuple(ElasticInstance(i, 1, InstanceKind.FULL, c, serves=serves) for i, c in enumerate(capacities))


def with_memory(
    instances: tuple[ElasticInstance, ...], capacities: Iterable[int]
) -> tuple[ElasticInstance, ...]:
    """Return instances, and memory instances with the next ids and these pools."""
    first_id, serves = len(instances), instances[0].serves
    return instances + tuple(
        ElasticInstance(first_id + i, 1, InstanceKind.ATTENTION, c, serves=serves)
        for i, c in enumerate(capacities)
    )


def timed_request(number: int, num_prompt: int, num_output: int, arrival_time: float = 0.0) -> Request:
    """Return a request whose tokens mean nothing."""
    params = SamplingParams(max_tokens=num_output)
    return Request(f"r{number:03}", (7,) * num_prompt, params, arrival_time=arrival_time)


def simulate(
    policy: str | Policy,
    capacities: Iterable[int],
    requests: Iterable[Request],
    *,
    config: PolicyConfig | None = None,
    cost_model: CostModel | None = None,
    incidents: Iterable[Event] = (),
    serves: Service = Service.ALL,
    keeps_prefixes: bool = False,
    memory: Iterable[int] = (),
) -> Run:
    """Run until drained. Check the accounting at every plan, and that nothing is left at the end.

    Besides, there are memory instances with pools of `memory`.
    """
    instances = with_memory(instances_with(capacities, serves), memory)
    run, state = Run(), ClusterState(instances, keeps_prefixes=keeps_prefixes)
    chosen = make_policy(policy, config or PolicyConfig()) if isinstance(policy, str) else policy
    model = cost_model or WorkCostModel()
    executor = SimulatedExecutor(model, requests, incidents, lookahead=LookaheadMargin.on(DEFAULT_HOST))

    def recorded(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        state.check()
        plan = chosen(snapshot, cost_model)
        run.plans.append((snapshot, plan))
        return plan

    async def drain() -> None:
        num_events = 0
        async for event in Scheduling(state, recorded, model, executor).events():
            num_events += 1
            assert num_events < MAX_EVENTS, "the run does not end"
            if isinstance(event, TokensProduced):
                for token in event.tokens:
                    run.tokens.setdefault(token.request_id, []).append(token)
                    run.token_times.setdefault(token.request_id, []).append(event.time)

    asyncio.run(drain())
    state.check()
    last = state.snapshot(executor.now)
    assert not last.request, f"requests never ended: {sorted(last.request)}"
    assert not any(instance.kv_used for instance in last.instances), last.instances
    run.stats, run.ended_at = last.stats, executor.now
    return run
