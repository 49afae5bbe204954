"""A recording says all that happened, and replaying it plans the same."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from simulation import instances_with, timed_request

import loong
from loong.core.applied import Applied
from loong.core.errors import ConfigError
from loong.core.events import (
    BatchFinished,
    BatchStarted,
    Event,
    InstanceJoined,
    InstanceLost,
    Logprobs,
    MigrationFinished,
    PrefixCacheReset,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.plan import IterationPlan
from loong.core.request import SLO, Continuation, FinishReason, Request
from loong.engine.loop import Scheduling
from loong.engine.replay import replay
from loong.executor.simulated import SimulatedExecutor
from loong.observability.recording.lines import VERSION, Setting, decoded, encoded
from loong.observability.recording.reader import Recording, read_recording
from loong.observability.recording.recorder import recording
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState

SETTING = Setting(
    version=VERSION,
    loong_version=loong.__version__,
    instances=instances_with([600, 600, 600]),
    policy="esp",
    policy_config=PolicyConfig(),
    cost_model=WorkCostModel(),
)
REQUESTS = [
    replace(
        timed_request(n, 20 + 97 * n % 500, 2 + n % 9, 3e-3 * n),
        slo=SLO(0.2 + n, 0.05),
        num_choices=1 + n % 3,
        num_prompt_logprobs=n % 5 or None,
    )
    for n in range(24)
]
INCIDENTS = (
    RequestAborted(0.02, "r003"),
    RequestAborted(0.05, "r005-1"),
    InstanceLost(0.1, 2),
    InstanceJoined(0.2, ElasticInstance(7, 1, InstanceKind.FULL, 600)),
)


def recorded(
    path: Path,
    setting: Setting = SETTING,
    *,
    requests: Iterable[Request] = REQUESTS,
    incidents: Iterable[Event] = (),
    slower: float = 1.0,
    keeps_prompts: bool = False,
) -> Recording:
    """Record a simulated run whose steps take `slower` times the predicted time."""

    async def run() -> None:
        state = ClusterState(setting.instances, keeps_prefixes=setting.keeps_prefixes)
        policy = make_policy(setting.policy, setting.policy_config)
        recalibration = Recalibration(setting.cost_model)
        believed = RecalibratedCostModel(recalibration) if setting.is_recalibrated else setting.cost_model
        truth = WorkCostModel(Coefficients(step=slower * Coefficients().step))
        executor = SimulatedExecutor(truth, requests, incidents)
        with recording(path, setting, keeps_prompts=keeps_prompts) as recorder:
            async for _ in Scheduling(state, policy, believed, executor, (recalibration, recorder)).events():
                pass

    asyncio.run(run())
    return read_recording(path)


def all_events() -> list[Event]:
    token = ProducedToken("r", 7, FinishReason.STOP)
    return [
        RequestArrived(0.1, replace(REQUESTS[3], user="someone", priority=-2)),
        RequestArrived(0.1, replace(REQUESTS[3], slo=SLO(2.0, inf), user="inf")),
        RequestArrived(0.1, replace(REQUESTS[3], cache_salt="inf", uses_cache=False)),
        RequestArrived(0.1, replace(REQUESTS[0], continues=Continuation([4], 0.5))),
        BatchStarted(0.15, 3),
        TokensProduced(0.2, 3, 1, (token, ProducedToken("s", 1))),
        BatchFinished(0.30000000000000004, 3, 2),
        MigrationFinished(0.4, 4, is_committed=False),
        RequestAborted(0.5, "r"),
        RequestAborted(0.5, "r", FinishReason.STOP),
        InstanceLost(0.6, 2, "gone"),
        PrefixCacheReset(0.65),
        InstanceJoined(0.7, ElasticInstance(9, 2, InstanceKind.HOST, 100)),
    ]


@pytest.mark.parametrize("event", all_events(), ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event: Event, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with recording(path, SETTING, keeps_prompts=True) as recorder:
        recorder.on_event(event, Applied())
    [happening] = read_recording(path).recorded_steps
    assert happening.events == [event]


def test_a_setting_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    config = PolicyConfig(target_ttft=inf, max_step_time=inf)
    setting = replace_setting(policy_config=config, keeps_prefixes=True)
    with recording(path, setting):
        pass
    assert read_recording(path).setting == setting


def test_prompts_are_replaced_by_their_length_unless_they_are_asked_for() -> None:
    event = decoded(encoded(RequestArrived(0.0, REQUESTS[1])))
    assert isinstance(event, RequestArrived)
    assert event.request.prompt_token_ids == range(len(REQUESTS[1].prompt_token_ids))


def test_a_prompt_without_tokens_stays_one() -> None:
    event = RequestArrived(0.0, replace(REQUESTS[1], prompt_token_ids=range(30)))
    assert decoded(encoded(event, keeps_prompts=True)) == event


def test_log_probabilities_are_left_out() -> None:
    event = TokensProduced(0.0, 1, 0, (ProducedToken("r", 1, None, Logprobs(-1.0)),))
    kept = decoded(encoded(event))
    assert kept == TokensProduced(0.0, 1, 0, (ProducedToken("r", 1),))


def test_who_looks_at_an_idle_cluster_sees_all_that_happened(tmp_path: Path) -> None:
    path, event = tmp_path / "log", RequestArrived(0.0, REQUESTS[1])
    state = ClusterState(SETTING.instances)
    with recording(path, SETTING) as recorder:
        recorder.on_event(event, state.apply(event))
        recorder.on_plan([event], state.snapshot(0.0), IterationPlan(), ())
        [happening] = read_recording(path).recorded_steps
        assert len(happening.plans) == 1


@pytest.mark.parametrize("policy", ["esp", "static-sp", "esp-disaggregated-1"])
def test_a_replay_plans_the_same(policy: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "log", replace_setting(policy=policy), slower=1.5)
    result = asyncio.run(replay(run))
    assert result.difference is None
    assert result.num_plans == sum(len(happening.plans) for happening in run.recorded_steps) > 20


def test_a_replay_shares_the_same_prefixes(tmp_path: Path) -> None:
    requests = [
        replace(request, cache_salt="abc"[n % 3], uses_cache=bool(n % 5))
        for n, request in enumerate(REQUESTS)
    ]
    setting = replace_setting(keeps_prefixes=True)
    incidents = (*INCIDENTS, PrefixCacheReset(0.15))
    run = recorded(tmp_path / "log", setting, requests=requests, incidents=incidents, keeps_prompts=True)
    assert asyncio.run(replay(run)).difference is None


def test_what_came_together_is_replayed_together(tmp_path: Path) -> None:
    requests = [replace(request, arrival_time=0.0) for request in REQUESTS]
    run = recorded(tmp_path / "log", requests=requests)
    assert len(run.recorded_steps[0].events) == len(requests)
    assert asyncio.run(replay(run)).difference is None


def test_a_replay_plans_the_same_when_instances_come_and_go(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log", replace_setting(policy="esp"), incidents=INCIDENTS)
    assert asyncio.run(replay(run)).difference is None


def test_a_replay_learns_the_same_corrections_of_the_cost_model(tmp_path: Path) -> None:
    setting = replace_setting(is_recalibrated=True)
    requests = [
        replace(timed_request(n, 20 + 97 * n % 500, 2 + n % 9, 0.03 * n), slo=SLO(0.2, 0.05))
        for n in range(100)
    ]
    run = recorded(tmp_path / "log", setting, requests=requests, slower=5.0)
    assert asyncio.run(replay(run)).difference is None
    run.setting = replace_setting(is_recalibrated=False)
    assert asyncio.run(replay(run)).difference is not None


def test_another_policy_differs_and_both_plans_are_reported(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log")
    run.setting = replace_setting(policy="replicas")
    result = asyncio.run(replay(run))
    assert result.difference is not None
    assert result.difference.number == result.num_plans + 1
    assert result.difference.recorded is not None
    assert result.difference.replayed is not None
    assert result.difference.recorded.digest != result.difference.replayed.digest


def test_a_plan_that_is_not_made_again_is_a_difference(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log")
    on_plan = next(happening for happening in run.recorded_steps if happening.plans)
    on_plan.plans.append(on_plan.plans[0])
    result = asyncio.run(replay(run))
    assert result.difference is not None
    assert (result.difference.event, result.difference.replayed) == (on_plan.events[-1], None)


def test_a_recording_that_ends_in_the_middle_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = asyncio.run(replay(recorded(path))).num_plans
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in range(2, len(lines), 7):
        part = tmp_path / f"part-{cut}"
        part.write_bytes(b"".join(lines[:cut]) + lines[cut][:-5])
        result = asyncio.run(replay(read_recording(part)))
        assert result.difference is None
        assert result.num_plans < whole


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    recorded(tmp_path / "log")
    with pytest.raises(ConfigError, match="exists"):
        recorded(tmp_path / "log")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "does not begin with a setting"),
        ("nonsense\n", "line 1"),
        ('{"line":"batch_finished","event":{"time":1.0,"batch_id":1,"num_steps":1}}\n', "does not begin"),
        ('{"line":"setting"}\n', "line 1"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_recording(path)


def test_a_recording_of_another_version_is_refused(tmp_path: Path) -> None:
    with recording(tmp_path / "log", replace_setting(version=VERSION + 1)):
        pass
    with pytest.raises(ConfigError, match=f"version {VERSION + 1}"):
        read_recording(tmp_path / "log")


def replace_setting(**changes: object) -> Setting:
    fields = {name: getattr(SETTING, name) for name in SETTING.__struct_fields__}
    return Setting(**{**fields, **changes})


@pytest.mark.parametrize(
    ("cost_model", "said"),
    [
        (WorkCostModel(Coefficients(token=0.0)), "token must be 1e-15 to"),
        (WorkCostModel(Coefficients(pair=1e300)), "pair must be 0 to"),
        (WorkCostModel(Coefficients(step=-1.0)), "step must be 0 to .*, but is -1"),
        (WorkCostModel(overlap=2.0), "overlap must be 0 to 1, but is 2"),
    ],
)
def test_a_recording_with_times_that_cannot_be_is_refused(
    cost_model: WorkCostModel, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    with recording(path, Setting(VERSION, "", instances_with([9]), "esp", PolicyConfig(), cost_model)):
        pass
    with pytest.raises(ConfigError, match=f"is damaged: {said}"):
        read_recording(path)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":' * 100_000 + b"\n")
    with pytest.raises(ConfigError, match="is not a recording: line 1: maximum recursion depth"):
        read_recording(path)
