"""The time of a step of prompts: what its end delays bounds it, and never its own overhead."""

import pytest
from machines import H200
from simulation import Run, simulate, timed_request
from snapshots import decoding, snapshot_of, waiting

from loong.core.cost.cost_model import CostModel
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import make_policy
from loong.scheduler.tuning import MAX_STEP_SHARE, MIN_OVERHEAD_SHARE, PLANNED_TTFT_SHARE

SLOW = WorkCostModel(Coefficients(weights=0.4, token=0.01))  # as a small model on one core
POLICIES = (
    "esp",
    "esp-fixed-1",
    "esp-fixed-4",
    "esp-fcfs",
    "esp-no-apart",
    "esp-no-lone",
    "esp-disaggregated-1",
)


def planned(
    *views: RequestView, cost_model: CostModel = SLOW, config: PolicyConfig | None = None
) -> BatchPlan:
    """Return the batch of the first prompt on four instances."""
    policy = make_policy("esp", config or PolicyConfig())
    plan = policy(snapshot_of([10**6] * 4, views), cost_model)
    (batch,) = (batch for batch in plan.batches if views[0].request_id in batch.request_ids)
    return batch


def chunks_of(run: Run, request_id: str) -> list[BatchPlan]:
    """Return the batches that compute a part of a prompt."""
    plans: list[IterationPlan] = [plan for _, plan in run.plans]
    batches = (batch for plan in plans for batch in plan.batches)
    return [b for b in batches if any(len(block.positions) > 1 for block in b.blocks_of(request_id))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_prompt_on_a_slow_idle_server_is_hardly_cut(policy: str) -> None:
    run = simulate(policy, [10_000] * 4, [timed_request(0, 1042, 2)], cost_model=SLOW)
    whole = simulate(
        policy,
        [10_000] * 4,
        [timed_request(0, 1042, 2)],
        cost_model=SLOW,
        config=PolicyConfig(max_step_time=99),
    )
    assert len(chunks_of(run, "r000")) <= 4
    first, least = run.token_times["r000"][0], whole.token_times["r000"][0]
    assert first <= (1 + 2 * MIN_OVERHEAD_SHARE) * least


def num_computed(*views: RequestView) -> int:
    """Return the tokens of the first prompt in its first step."""
    return sum(len(block.positions) for block in planned(*views).blocks_of(views[0].request_id))


def test_a_lone_prompt_on_processors_is_one_chunk_unless_it_is_long_or_not_alone() -> None:
    assert num_computed(waiting("lone", 4000)) == 4000
    assert num_computed(waiting("lone", 4000), waiting("other", 4000)) < 2000
    assert num_computed(waiting("lone", 10_000)) < 2000


def test_a_lone_prompt_on_a_gpu_has_steps_after_which_another_can_be_in_time() -> None:
    batch = planned(waiting("long", 300_000), cost_model=H200)
    assert batch.predicted_time == pytest.approx(MAX_STEP_SHARE / 2, rel=0.05)


@pytest.mark.parametrize("other", [waiting("other", 5000), decoding("other", 50, (3,))])
def test_a_short_prompt_that_comes_during_a_step_of_a_slow_server_is_in_time(other: RequestView) -> None:
    config = PolicyConfig()
    batch = planned(waiting("long", 4000), other)
    least = SLOW.prefill_terms(4).least
    target = max(config.target_ttft, config.ttft_factor * SLOW.prefill_terms(4).time(1, 0, 1))
    assert batch.predicted_time is not None
    assert 2 * least < batch.predicted_time <= PLANNED_TTFT_SHARE * target - least


def test_the_bound_of_an_operator_holds_for_a_lone_prompt_too() -> None:
    batch = planned(waiting("long", 4000), config=PolicyConfig(max_step_time=1.5))
    assert batch.predicted_time == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("others", [(), (waiting("other", 5000),)])
def test_no_bound_is_below_what_it_costs_to_begin_a_step(others: tuple[RequestView, ...]) -> None:
    batch = planned(waiting("long", 4000), *others, config=PolicyConfig(max_step_time=0.01))
    assert batch.predicted_time is not None
    assert batch.predicted_time > 1.9 * SLOW.prefill_terms(len(batch.group.instance_ids)).least
