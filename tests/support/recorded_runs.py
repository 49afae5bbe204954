"""Runs of any policy in virtual time, in which much happens, with all that observers make of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from policies import num_instances_of
from simulation import instances_with, timed_request

from loong.core.applied import Applied
from loong.core.cluster_history import ClusterHistory
from loong.core.events import Event, InstanceJoined, InstanceLost, RequestAborted
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.request import SLO, Request
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.lookahead import LookaheadMargin
from loong.executor.simulated import SimulatedExecutor
from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.log import DecisionLog
from loong.observability.recording.lines import planned_line
from loong.observability.timeline import Timeline
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST, WorkCostModel
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import Policy, admissible_tokens, make_policy, policy_kind
from loong.state.cluster_state import ClusterState

CAPACITY = 3000
NUM_REQUESTS = 40


@dataclass
class RecordedRun:
    """A run that has drained: its decision log, its timeline, and a digest of each plan."""

    lines: list[Line] = field(default_factory=list)
    history: ClusterHistory = field(default_factory=ClusterHistory)
    digests: list[str] = field(default_factory=list)

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Events show in the lines."""

    def on_plan(
        self,
        _events: Sequence[Event],
        _snapshot: Snapshot,
        plan: IterationPlan,
        _reported: Sequence[Instruction],
        /,
    ) -> None:
        """Keep the digest of a plan."""
        self.digests.append(planned_line(plan).digest)


def requests_of(random: Random, max_tokens: int) -> list[Request]:
    """Return prompts short and long that come in bursts, some with several choices."""
    now, requests = 0.0, []
    for number in range(NUM_REQUESTS):
        now += random.choice([0.0, 0.002, 0.02, 0.2])
        num_output = random.choice([1, 2, 9, 40])
        num_prompt = min(random.choice([3, 90, 700, 2500]), max_tokens // 4 - num_output)
        request = timed_request(number, num_prompt, num_output, now)
        num_choices = random.choice([1, 1, 1, 3])
        requests.append(replace(request, slo=SLO(0.5, 0.05), num_choices=num_choices))
    return requests


def incidents_of(random: Random, requests: Sequence[Request], *, has_losses: bool) -> list[Event]:
    """Clients that leave, and an instance that is lost and replaced."""
    leaving = random.sample(requests, 8)
    incidents: list[Event] = [
        RequestAborted(r.arrival_time + random.choice([0.0, 0.003, 0.04, 0.3]), r.request_id) for r in leaving
    ]
    if has_losses:
        lost_at = random.choice([0.03, 0.3, 1.0])
        joining = ElasticInstance(7, 1, InstanceKind.FULL, CAPACITY)
        incidents += [InstanceLost(lost_at, 1, "pulled"), InstanceJoined(lost_at + 0.1, joining)]
    return sorted(incidents, key=lambda incident: incident.time)


def recorded_run(
    policy: str | Policy,
    seed: int,
    *,
    noise: float = 0.3,
    plan_time: float = 0.0,
    lookahead: LookaheadMargin | None = None,
) -> RecordedRun:
    """Run a policy on two to four instances until all has ended; ends are predicted."""
    random, run = Random(seed), RecordedRun()
    kind = policy_kind(policy) if isinstance(policy, str) else None
    num_instances = random.choice([2, 3, 4])
    if isinstance(policy, str):
        num_instances = num_instances_of(policy, num_instances)
    instances = instances_with([CAPACITY] * num_instances)
    limit = CAPACITY if kind is None else admissible_tokens(str(policy), instances)
    requests = requests_of(random, limit)
    has_losses = (kind is None or kind.max_instances is None) and seed % 2 == 1
    incidents = incidents_of(random, requests, has_losses=has_losses)
    recalibration, timeline = Recalibration(WorkCostModel()), Timeline()
    log = DecisionLog(None, listeners=[lambda line, _: run.lines.append(line)])
    executor = SimulatedExecutor(
        WorkCostModel(),
        requests,
        incidents,
        plan_time=plan_time,
        noise=noise,
        lookahead=lookahead or LookaheadMargin.on(DEFAULT_HOST),
    )
    chosen = make_policy(policy, PolicyConfig(lease_steps=16)) if isinstance(policy, str) else policy
    model = RecalibratedCostModel(recalibration)
    observers = (recalibration, timeline, log, run)

    async def drain() -> None:
        async for _ in Scheduling(ClusterState(instances), chosen, model, executor, observers).events():
            pass

    asyncio.run(drain())
    run.history = timeline.history()
    return run
