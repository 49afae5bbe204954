"""Laws that every policy keeps, on any cluster and workload, in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policies import POLICY_NAMES, num_instances_of
from simulation import instances_with, simulate, timed_request
from snapshots import begun, snapshot_of, waiting

from loong.core.decision import DecisionKind
from loong.core.events import Event, InstanceJoined, InstanceLost, RequestAborted
from loong.core.plan import Failure, FailureCause
from loong.core.request import FinishReason, Request
from loong.core.snapshot import ClusterStats
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import admissible_tokens, make_policy, policy_kind
from loong.scheduler.tuning import MAX_LOSSES

# The published policy admits as if all batches decoded in step, so that it may have to.
MAY_EVICT = ("esp-paper",)
APART = ("disaggregated-1", "esp-disaggregated-1")  # which need two instances


@st.composite
def clusters(draw: st.DrawFn, name: str) -> list[int]:
    kind = policy_kind(name)
    groups = st.integers(kind.num_decode + 1, (kind.max_instances or 6) // kind.group_size)
    num_instances = kind.group_size * draw(groups)
    return draw(st.lists(st.integers(1, 50), min_size=num_instances, max_size=num_instances))


@st.composite
def workloads(draw: st.DrawFn, max_tokens: int) -> list[Request]:
    """Return requests, in order of arrival, each of which fits the cluster by itself."""
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(1, max_tokens),
                st.integers(1, max_tokens),
                st.floats(0, 0.05, allow_nan=False),
            ),
            min_size=1,
            max_size=8,
        )
    )
    now, requests = 0.0, []
    for number, (num_prompt, num_output, gap) in enumerate(shapes):
        now += gap
        num_output = min(num_output, max_tokens - num_prompt + 1)
        requests.append(timed_request(number, num_prompt, num_output, now))
    return requests


configs = st.builds(
    PolicyConfig,
    target_ttft=st.sampled_from([1e-3, 0.02, 0.1, inf]),
    max_num_batched_tokens=st.sampled_from([1, 7, 64, 512]),
    lease_steps=st.sampled_from([1, 2, 16]),
    chunk_tokens=st.sampled_from([1, 7, 512]),
)


def assert_all_complete(requests: Sequence[Request], num_tokens: dict[str, int]) -> None:
    expected = {r.request_id: r.sampling_params.max_tokens for r in requests}
    assert num_tokens == expected


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=8)
@given(data=st.data())
def test_every_request_ends_with_exactly_its_tokens_and_nothing_leaks(name: str, data: st.DataObject) -> None:
    capacities = data.draw(clusters(name))
    requests = data.draw(workloads(admissible_tokens(name, instances_with(capacities))))
    run = simulate(name, capacities, requests, config=data.draw(configs))
    assert_all_complete(requests, {r: len(tokens) for r, tokens in run.tokens.items()})
    for tokens in run.tokens.values():
        assert [token.token_id for token in tokens] == list(range(len(tokens)))
        assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=8)
@given(data=st.data())
def test_requests_that_are_aborted_at_any_time_leave_nothing_behind(name: str, data: st.DataObject) -> None:
    capacities = data.draw(clusters(name))
    requests = data.draw(workloads(admissible_tokens(name, instances_with(capacities))))
    leaving = data.draw(st.sets(st.sampled_from(requests)))
    delays = st.floats(0, 0.3, allow_nan=False)
    aborts = [RequestAborted(r.arrival_time + data.draw(delays), r.request_id) for r in leaving]
    run = simulate(name, capacities, requests, incidents=sorted(aborts, key=lambda abort: abort.time))
    staying = [r for r in requests if r not in leaving]
    assert_all_complete(staying, {r.request_id: len(run.tokens[r.request_id]) for r in staying})


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_32_requests_whose_outputs_cannot_all_fit_share_the_room(name: str) -> None:
    num_instances = num_instances_of(name, 4)
    requests = [timed_request(number, 20, 40, number * 1e-3) for number in range(32)]
    run = simulate(name, [600 // num_instances] * num_instances, requests)
    assert_all_complete(requests, {r: len(tokens) for r, tokens in run.tokens.items()})
    if name not in MAY_EVICT:
        assert run.stats.num_preemptions == 0


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in APART])
def test_a_request_starts_soon_after_the_end_of_the_one_whose_room_it_waits_for(name: str) -> None:
    ending, going_on = timed_request(0, 100, 20), timed_request(1, 20, 60)
    waiting = timed_request(2, 150, 10, arrival_time=0.05)
    run = simulate(name, [300], [ending, going_on, waiting], config=PolicyConfig(lease_steps=64))
    room_at, started_at = run.token_times["r000"][-1], run.token_times["r002"][0]
    steps = [time for time in run.token_times["r001"] if room_at < time <= started_at]
    assert waiting.arrival_time < room_at
    assert 1 <= len(steps) <= 2


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in APART])
@pytest.mark.parametrize("num_prompt", [None, 290])
def test_no_lease_ends_for_a_request_that_ends_if_its_room_helps_nobody(
    name: str, num_prompt: int | None
) -> None:
    requests = [timed_request(0, 100, 20), timed_request(1, 20, 200)]
    if num_prompt is not None:  # it finds no room next to the other
        requests.append(timed_request(2, num_prompt, 10, arrival_time=0.05))
    run = simulate(name, [300], requests, config=PolicyConfig(lease_steps=64))
    assert not any(plan.lease_ends for _, plan in run.plans)


@pytest.mark.parametrize("name", ["esp", "esp-paper", "infinite", "static-sp"])
def test_a_prompt_longer_than_one_pool_is_spread(name: str) -> None:
    requests = [timed_request(0, 350, 51), timed_request(1, 30, 20, 0.01), timed_request(2, 300, 100, 0.02)]
    run = simulate(name, [100, 100, 100, 100], requests)
    assert_all_complete(requests, {r: len(tokens) for r, tokens in run.tokens.items()})


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_same_snapshot_gives_the_same_plan(name: str) -> None:
    requests = [timed_request(n, 5 + 37 * n % 200, 1 + n % 9, n * 2e-3) for n in range(20)]
    run = simulate(name, [2000] * num_instances_of(name, 3), requests)
    again = make_policy(name, PolicyConfig())
    assert all(again(snapshot, WorkCostModel()) == plan for snapshot, plan in run.plans)


@pytest.mark.parametrize("name", [n for n in POLICY_NAMES if policy_kind(n).max_instances is None])
@pytest.mark.parametrize("lost_id", [0, 1])
def test_what_no_longer_fits_after_a_loss_fails_by_name_and_holds_up_nobody(name: str, lost_id: int) -> None:
    capacities = [3000] * num_instances_of(name, 2)
    num_prompt = min(5000, admissible_tokens(name, instances_with(capacities)) - 10)
    large, late = timed_request(0, num_prompt, 9), timed_request(9, num_prompt, 9, 9.0)
    others = [timed_request(number, 100, 5, float(number)) for number in range(1, 9)]
    run = simulate(name, capacities, [large, *others, late], incidents=[InstanceLost(0.05, lost_id)])
    assert_all_complete(others, {r.request_id: len(run.tokens[r.request_id]) for r in others})
    failures = {failure.request_id: failure.reason for _, plan in run.plans for failure in plan.failures}
    assert run.stats.num_failed == len(failures)
    left = {instance_id: 3000 for instance_id in range(len(capacities)) if instance_id != lost_id}
    limit = policy_kind(name).max_request_tokens(left)
    if num_prompt + 8 <= limit:
        assert not failures
        return
    assert failures.keys() == {large.request_id, late.request_id}
    assert all(str(num_prompt + 8) in reason and str(limit) in reason for reason in failures.values())


@pytest.mark.parametrize("num_computed", [0, 900])
def test_a_request_that_holds_kv_fails_too_once_the_rest_can_never_fit(num_computed: int) -> None:
    view = begun("r", 5000, num_computed, (0,)) if num_computed else waiting("r", 5000)
    plan = make_policy("esp", PolicyConfig())(snapshot_of([3000], [view]), WorkCostModel())
    assert [failure.request_id for failure in plan.failures] == ["r"]
    assert [(d.kind, d.request_ids) for d in plan.decisions] == [(DecisionKind.FAIL, ("r",))]


def test_a_request_that_lost_too_many_instances_fails_by_name_and_no_other() -> None:
    numbers, suspected = (MAX_LOSSES - 1, MAX_LOSSES), range(8, 16)
    views = [replace(waiting(f"lost{n}", 20), num_losses=n, suspected=suspected) for n in numbers]
    snapshot = replace(snapshot_of([3000], views), stats=ClusterStats(num_losses=MAX_LOSSES))
    plan = make_policy("esp", PolicyConfig())(snapshot, WorkCostModel())
    lost = f"{MAX_LOSSES} instances were lost while they computed request lost{MAX_LOSSES}"
    reason = f"{lost}, each at positions 8 to 15"
    assert plan.failures == (Failure(f"lost{MAX_LOSSES}", reason, FailureCause.LOSSES),)


@pytest.mark.parametrize("name", [n for n in POLICY_NAMES if policy_kind(n).max_instances is None])
@examples(1, thorough=8)
@given(data=st.data())
def test_every_request_ends_whatever_is_lost_for_a_time(name: str, data: st.DataObject) -> None:
    instances = instances_with([data.draw(st.sampled_from([150, 300, 1000]))] * num_instances_of(name, 4))
    requests = data.draw(workloads(min(200, admissible_tokens(name, instances))))
    lost_at, seconds = data.draw(st.floats(0, 0.2)), data.draw(st.floats(1e-3, 0.3))
    lost = data.draw(st.sampled_from(instances))
    incidents: list[Event] = [
        InstanceLost(lost_at, lost.instance_id, returns=True),
        InstanceJoined(lost_at + seconds, lost),
    ]
    capacities = [instance.kv_capacity for instance in instances]
    run = simulate(name, capacities, requests, incidents=incidents, config=data.draw(configs))
    assert_all_complete(requests, {r: len(tokens) for r, tokens in run.tokens.items()})
    num_needed = sum(len(r.prompt_token_ids) + r.sampling_params.max_tokens - 1 for r in requests)
    if not run.stats.num_preemptions:
        assert run.stats.num_computed_tokens == num_needed + run.stats.num_recomputed_tokens


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_while_no_instance_is_left_all_wait_for_one(name: str) -> None:
    requests = [timed_request(number, 100, 5) for number in range(3)]
    joined = InstanceJoined(2.0, instances_with([3000])[0])
    run = simulate(name, [3000], requests, incidents=[InstanceLost(0.001, 0), joined])
    assert_all_complete(requests, {r: len(tokens) for r, tokens in run.tokens.items()})
    assert run.stats.num_failed == 0
