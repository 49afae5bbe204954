"""Chats gather while decodes go on, where a step for each would mostly go to telling of the decodes."""

from dataclasses import replace

import pytest
from machines import DEAR, H200
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp import LONGEST_WAIT, PLAN_SECONDS, PLAN_SHARE, TELLING_SHARE, plan_esp
from loong.scheduler.leases import telling_time

NOW = 100.0
DECODES = [
    replace(decoding(f"d{i}", 500, (0,), max_tokens=900), first_token_time=NOW, last_token_time=NOW)
    for i in range(200)
]
TELLING = telling_time((0,), len(DECODES), H200)
CONFIG = PolicyConfig()


def planned(*prompts: RequestView) -> IterationPlan:
    """With nothing in flight on the only instance."""
    return plan_esp(snapshot_of([900_000], [*DECODES, *prompts], now=NOW), H200, CONFIG)


def prompt(num_tokens: int, *, waited: float = 0.0, name: str = "p") -> RequestView:
    return waiting(name, num_tokens, arrival_time=NOW - waited)


def begins(plan: IterationPlan) -> bool:
    (batch,) = plan.batches
    return not {view.request_id for view in DECODES} >= set(batch.request_ids)


def test_to_tell_of_decodes_takes_a_batch_and_each_of_its_requests_once() -> None:
    costs = DEAR.coefficients
    for num_decodes in (1, 7, 300):
        expected = costs.batch + costs.told_request * num_decodes
        assert telling_time((0, 1), num_decodes, DEAR) == pytest.approx(expected)


def test_a_chat_that_has_just_come_waits_for_a_lease_of_many_decodes() -> None:
    assert not begins(planned(prompt(100)))


def test_it_waits_until_telling_has_its_share_at_most() -> None:
    assert 0.05 < TELLING / TELLING_SHARE < LONGEST_WAIT * CONFIG.target_ttft
    assert not begins(planned(prompt(100, waited=0.7 * TELLING / TELLING_SHARE)))
    assert begins(planned(prompt(100, waited=TELLING / TELLING_SHARE)))


def test_prompts_that_are_work_enough_begin_when_the_engine_has_had_its_time() -> None:
    waited = PLAN_SECONDS * len(DECODES) / PLAN_SHARE
    assert not begins(planned(prompt(100, waited=waited)))
    assert begins(planned(prompt(10_000, waited=waited)))
    assert begins(planned(*(prompt(1000, name=f"p{i}", waited=waited) for i in range(10))))


@pytest.mark.parametrize("num_decodes", [1, 8])
def test_beside_few_decodes_nobody_waits_for_more_than_some_steps(num_decodes: int) -> None:
    assert telling_time((0,), num_decodes, H200) / TELLING_SHARE < 0.015


@pytest.mark.parametrize("num_taken", [0, 3, 30])
def test_a_lease_that_runs_ends_once_it_has_lasted_as_long(num_taken: int) -> None:
    seconds = 0.015
    lease = decode(DECODES, [0], {view.request_id: 0 for view in DECODES}, num_steps=64)
    batch = running(1, replace(lease, predicted_time=seconds), NOW - num_taken * seconds, num_taken)
    for num_tokens, is_work_enough in ((100, False), (10_000, True)):
        snapshot = snapshot_of([900_000], [*DECODES, prompt(num_tokens)], [batch], now=NOW)
        (end,) = plan_esp(snapshot, H200, CONFIG).lease_ends
        if is_work_enough:
            assert end.step == num_taken + 1
        else:
            assert end.step > num_taken
            assert end.step == num_taken + 1 or 0.8 < end.step * seconds * TELLING_SHARE / TELLING <= 1.2
