"""Observers of requests and plans, over the engine's decision log."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRun, RequestRuns
from loong.scheduler.esp.reasons import DEFERRED
from loong.server.metrics.spans import Spans

if TYPE_CHECKING:  # policies need numba, and API processes do not
    from loong.scheduler.policy import Policy

MAX_OVER = 500


class Targets(NamedTuple):
    """The targets of a request: seconds to its first token, and for each later token."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class RequestObservers:
    """The shared data of dashboard and metrics.

    `errors` returns the cost model's errors by phase, and `target` the targets of a prompt length in tokens.
    `over` are the last ended requests, oldest first. `plan_listeners` get the seconds of each plan.
    """

    policy: str
    recent: RecentLines
    runs: RequestRuns
    errors: Callable[[], Mapping[str, float]]
    target: Callable[[int], Targets]
    spans: Spans | None = None
    over: deque[RequestRun] = field(default_factory=lambda: deque(maxlen=MAX_OVER))
    plan_listeners: list[Callable[[float], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs.subscribe(self.over.append)
        if self.spans is not None:
            self.runs.subscribe(self.spans.observe_run)

    def timed(self, policy: "Policy") -> "Policy":
        """Return the policy with a timer around each plan."""

        def plan(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
            start = perf_counter()
            made = policy(snapshot, cost_model)
            seconds = perf_counter() - start
            for listener in self.plan_listeners:
                listener(seconds)
            return made

        return plan

    def is_deferred(self, request_id: RequestId) -> bool:
        """Return whether a request waits because the policy deferred it."""
        run = self.runs.live_run(request_id)
        return run is not None and run.waits_for in DEFERRED

    def target_of(self, run: RequestRun) -> Targets:
        """Return the targets of a request: its own, or else the policy's."""
        default = self.target(run.num_prompt_tokens)
        return Targets(
            default.ttft if run.ttft_slo is None else run.ttft_slo,
            default.tpot if run.tpot_slo is None else run.tpot_slo,
        )
