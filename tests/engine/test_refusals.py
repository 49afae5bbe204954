"""A policy with a bug: the requests that it cannot plan fail, and all others go on."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import prefill
from simulation import instances_with, timed_request
from snapshots import running, snapshot_of, waiting

import loong
from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidPlanError
from loong.core.events import Event, TokensProduced
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.engine.refusals import Refusals
from loong.executor.lookahead import LookaheadMargin
from loong.executor.simulated import SimulatedExecutor
from loong.observability.recording.lines import VERSION, Setting
from loong.observability.recording.reader import read_recording
from loong.observability.recording.refused import MAX_FILES, RefusedPlans
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST, WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.simulation.replay import replay_and_report
from loong.state.cluster_state import ClusterState

SETTING = Setting(
    VERSION, loong.__version__, instances_with([600] * 2), "replicas", PolicyConfig(), WorkCostModel()
)
GOOD = [timed_request(n, 20 + 97 * n % 300, 2 + n % 9, 3e-3 * n) for n in range(12)]
BAD = replace(timed_request(0, 40, 5, 0.01), request_id="bad")
Spoil = Callable[[Snapshot, IterationPlan], IterationPlan]


def too_much_room(snapshot: Snapshot, plan: IterationPlan) -> IterationPlan:
    """Batches with the bad request store some of it on an instance that does not exist."""
    batches = []
    for batch in plan.batches:
        writes = [w._replace(instance_id=99) if w.owner_id == "bad" else w for w in batch.writes]
        batches.append(replace(batch, writes=tuple(writes)))
    return replace(plan, batches=tuple(batches))


def error_while_it_waits(snapshot: Snapshot, plan: IterationPlan) -> IterationPlan:
    """The policy raises an error whenever it sees the bad request wait."""
    if any(view.request_id == "bad" for view in snapshot.waiting):
        raise ZeroDivisionError("bad")
    return plan


def error_while_it_runs(snapshot: Snapshot, plan: IterationPlan) -> IterationPlan:
    """The policy raises an error once the bad request has two tokens."""
    if any(view.request_id == "bad" and view.num_output_tokens > 1 for view in snapshot.running):
        raise ZeroDivisionError("bad")
    return plan


def moves_what_waits(snapshot: Snapshot, plan: IterationPlan) -> IterationPlan:
    """The bad request is preempted though it has no KV, in every plan while it lives."""
    if "bad" in snapshot.request:
        return replace(plan, preemptions=(*plan.preemptions, Preemption("bad")))
    return plan


def run(spoil: Spoil, requests: list[Request], folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return how many tokens each request got, and the reasons of those that failed."""
    policy = make_policy(SETTING.policy, SETTING.policy_config)

    def spoiled(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        return spoil(snapshot, policy(snapshot, cost_model))

    return asyncio.run(drain(spoiled, requests, Refusals(RefusedPlans(SETTING, folder).record)))


async def drain(
    policy: Policy, requests: list[Request], refusals: Refusals
) -> tuple[dict[str, int], dict[str, str]]:
    executor = SimulatedExecutor(SETTING.cost_model, requests, lookahead=LookaheadMargin.on(DEFAULT_HOST))
    state, failures = ClusterState(SETTING.instances), Failures()
    num_tokens: dict[str, int] = {}
    scheduling = Scheduling(state, policy, SETTING.cost_model, executor, (failures,), refusals)
    async for event in scheduling.events():
        if isinstance(event, TokensProduced):
            for token in event.tokens:
                num_tokens[token.request_id] = num_tokens.get(token.request_id, 0) + 1
    state.check()
    assert not state.snapshot(executor.now).request
    return num_tokens, failures.reasons


class Failures:
    """An observer of requests that fail."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def on_event(self, event: Event, _applied: object, /) -> None:
        """Ignore events, which do not report failures."""

    def on_plan(self, _events: object, _snapshot: object, plan: IterationPlan, _reported: object, /) -> None:
        """Keep the reasons."""
        self.reasons.update((failure.request_id, failure.reason) for failure in plan.failures)


@pytest.mark.parametrize(
    "spoil", [too_much_room, error_while_it_waits, error_while_it_runs, moves_what_waits]
)
def test_a_request_without_a_valid_plan_fails_and_all_others_end(spoil: Spoil, tmp_path: Path) -> None:
    num_tokens, failures = run(spoil, sorted([*GOOD, BAD], key=lambda r: r.arrival_time), tmp_path)
    assert failures.keys() <= {"bad"}
    assert failures or num_tokens["bad"] == 5  # one whose other parts are valid goes on
    num_tokens.pop("bad", None)
    assert num_tokens == {r.request_id: r.sampling_params.max_tokens for r in GOOD}


@pytest.mark.parametrize("spoil", [too_much_room, error_while_it_waits])
def test_a_bad_request_alone_fails_at_once(spoil: Spoil, tmp_path: Path) -> None:
    num_tokens, failures = run(spoil, [BAD], tmp_path)
    assert not num_tokens
    assert "no valid plan" in failures["bad"]


def test_a_request_waits_for_the_one_that_took_the_room_that_it_was_planned_for() -> None:
    refusals = Refusals(lambda _snapshot, _plan, _error: "nowhere")
    views = [waiting(name, 30) for name in "ab"]
    snapshot = snapshot_of([48], views)
    plan = IterationPlan(tuple(prefill([view], (0,)) for view in views))
    (taken,) = refusals.amend(snapshot, plan, InvalidPlanError("no room")).batches
    assert taken.request_ids == ("a",)
    later = snapshot_of([48], views, [running(1, taken)])
    again = refusals.amend(later, IterationPlan(plan.batches[1:]), InvalidPlanError("no room"))
    assert again == IterationPlan()


def test_a_refused_plan_is_kept_with_its_snapshot_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(too_much_room, [BAD], tmp_path)
    (path,) = tmp_path.iterdir()
    refused = read_recording(path).refused
    assert refused is not None
    assert "99" in refused.error
    assert refused.plan.batches[0].writes[0].instance_id == 99
    assert refused.snapshot.request["bad"].num_prompt_tokens == 40
    assert replay_and_report(path) == 0  # the policy itself has no bug
    reported = capsys.readouterr().out
    assert "99" in reported
    assert "this version makes a valid plan" in reported


def test_no_more_files_are_written_than_a_few(tmp_path: Path) -> None:
    record = RefusedPlans(SETTING, tmp_path).record
    empty = Snapshot(0.0, SETTING.instances), IterationPlan()
    reported = [record(*empty, ValueError(str(n))) for n in range(MAX_FILES + 1)]
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    assert f"{MAX_FILES} such plans were kept before" in reported[-1]
    record = RefusedPlans(SETTING, tmp_path / "missing").record
    assert "could not be kept" in record(*empty, ValueError())
