"""Chats are batched while decodes go on, where a step for each would mostly go to sending the decodes."""

from dataclasses import replace
from math import ceil

import pytest
from machines import DEAR, H200
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.plan import IterationPlan
from loong.core.request import SLO, RequestView
from loong.scheduler.common.leases import lease_start_time
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST
from loong.scheduler.esp.policy import plan_esp
from loong.scheduler.tuning import (
    LEASE_START_SHARE,
    MAX_BATCHING_WAIT,
    MAX_PLANNING_SHARE,
    PLANNED_TTFT_SHARE,
)

NOW = 100.0
SLOW = waiting("p", 100, arrival_time=NOW - 0.01)
DECODES = [
    replace(decoding(f"d{i}", 500, (0,), max_tokens=900), first_token_time=NOW, last_token_time=NOW)
    for i in range(200)
]
START_SECONDS = lease_start_time((0,), len(DECODES), H200)
CONFIG = PolicyConfig()


def planned(*prompts: RequestView) -> IterationPlan:
    """With nothing in flight on the only instance."""
    return plan_esp(snapshot_of([900_000], [*DECODES, *prompts], now=NOW), H200, CONFIG)


def prompt(num_tokens: int, *, waited: float = 0.0, name: str = "p") -> RequestView:
    return waiting(name, num_tokens, arrival_time=NOW - waited)


def begins(plan: IterationPlan) -> bool:
    (batch,) = plan.batches
    return not {view.request_id for view in DECODES} >= set(batch.request_ids)


def test_to_report_decodes_takes_a_batch_and_each_of_its_requests_once() -> None:
    costs = DEAR.coefficients
    for num_decodes in (1, 7, 300):
        expected = costs.batch + costs.sent_request * num_decodes
        assert lease_start_time((0, 1), num_decodes, DEAR) == pytest.approx(expected)


def test_a_chat_that_has_just_come_waits_for_a_lease_of_many_decodes() -> None:
    assert not begins(planned(prompt(100)))


def test_it_waits_until_reporting_has_its_share_at_most() -> None:
    assert 0.05 < START_SECONDS / LEASE_START_SHARE < MAX_BATCHING_WAIT * CONFIG.target_ttft
    assert not begins(planned(prompt(100, waited=0.7 * START_SECONDS / LEASE_START_SHARE)))
    assert begins(planned(prompt(100, waited=START_SECONDS / LEASE_START_SHARE)))


def test_prompts_that_are_work_enough_begin_when_the_engine_has_had_its_time() -> None:
    waited = DEFAULT_HOST.plan_request * len(DECODES) / MAX_PLANNING_SHARE
    assert not begins(planned(prompt(100, waited=waited)))
    assert begins(planned(prompt(10_000, waited=waited)))
    assert begins(planned(*(prompt(1000, name=f"p{i}", waited=waited) for i in range(10))))


@pytest.mark.parametrize("num_decodes", [1, 8])
def test_beside_few_decodes_nobody_waits_for_more_than_some_steps(num_decodes: int) -> None:
    assert lease_start_time((0,), num_decodes, H200) / LEASE_START_SHARE < 0.015


STEP = 0.015


def end_of_lease(num_taken: int, *prompts: RequestView) -> float:
    """Return the seconds from now to the end that is set for a running lease with these steps taken."""
    lease = decode(DECODES, [0], {view.request_id: 0 for view in DECODES}, num_steps=64)
    batch = running(1, replace(lease, predicted_time=STEP), NOW - num_taken * STEP, num_taken)
    snapshot = snapshot_of([900_000], [*DECODES, *prompts], [batch], now=NOW)
    (end,) = plan_esp(snapshot, H200, CONFIG).lease_ends
    return (end.step - num_taken) * STEP


@pytest.mark.parametrize("num_taken", [0, 3, 30])
def test_a_lease_that_runs_goes_on_while_a_chat_has_not_waited_for_as_long(num_taken: int) -> None:
    assert 0 <= end_of_lease(num_taken, prompt(100)) - START_SECONDS / LEASE_START_SHARE < STEP
    least = DEFAULT_HOST.plan_request * len(DECODES) / MAX_PLANNING_SHARE
    assert end_of_lease(num_taken, prompt(10_000)) == ceil(least / STEP) * STEP


@pytest.mark.parametrize("num_taken", [0, 3])
def test_who_waited_before_a_lease_waits_as_long_from_its_start(num_taken: int) -> None:
    since_start = end_of_lease(num_taken, prompt(100, waited=0.2)) + num_taken * STEP
    assert 0 <= since_start - START_SECONDS / LEASE_START_SHARE < STEP


def test_no_prompt_is_held_beyond_the_latest_time_to_begin() -> None:
    latest = PLANNED_TTFT_SHARE * CONFIG.target_ttft - 2 * STEP
    assert end_of_lease(1, prompt(100, waited=latest)) <= 2 * STEP
    assert end_of_lease(1, prompt(100, waited=2 * CONFIG.target_ttft)) > 0


def test_however_many_decode_the_wait_is_a_share_of_the_target() -> None:
    many = [
        replace(decoding(f"d{i}", 100, (0,), max_tokens=900), first_token_time=NOW, last_token_time=NOW)
        for i in range(350)
    ]
    assert (
        lease_start_time((0,), len(many), H200) / LEASE_START_SHARE > MAX_BATCHING_WAIT * CONFIG.target_ttft
    )
    for waited, is_over in ((0.5, False), (1.01, True)):
        late = prompt(100, waited=waited * MAX_BATCHING_WAIT * CONFIG.target_ttft)
        plan = plan_esp(snapshot_of([900_000], [*many, late], now=NOW), H200, CONFIG)
        assert any("p" in batch.request_ids for batch in plan.batches) == is_over


@pytest.mark.parametrize("own", [replace(SLOW, slo=SLO(ttft=0.06)), replace(SLOW, priority=-5)], ids=str)
def test_a_target_of_its_own_is_what_a_prompt_waits_a_share_of(own: RequestView) -> None:
    assert not begins(planned(SLOW))
    assert begins(planned(own))
