"""No request is preempted for KV that a batch about to end may free."""

from dataclasses import replace

import pytest
from machines import H200, H200_CAPACITY
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.plan import IterationPlan, Preemption
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.esp.policy import ABLATIONS, plan_esp
from loong.scheduler.policy import make_policy

GONE = decoding("gone", 10, (0,))
COSTS = WorkCostModel()


def full(num_instances: int, *ending_on: int) -> Snapshot:
    """The first instance has no slot for its two requests; batches are ending on some."""
    views = [replace(decoding(f"r{i}", 50, (0,), max_tokens=20), arrival_time=float(i)) for i in range(2)]
    batches = (replace(decode([GONE], (i,), {"gone": i}), predicted_time=0.1) for i in ending_on)
    ending = tuple(running(number, batch, 9.0) for number, batch in enumerate(batches))
    return replace(snapshot_of([100] * num_instances, views, now=9.0), ending=ending)


@pytest.mark.parametrize("name", ["replicas", "static-sp", "esp"])
def test_nobody_is_preempted_where_a_batch_is_ending(name: str) -> None:
    plan = make_policy(name, PolicyConfig())(full(1, 0), COSTS)
    assert replace(plan, decisions=()) == IterationPlan()


def test_others_go_on_meanwhile() -> None:
    snapshot = full(2, 0)
    prompt = waiting("w", 20)
    plan = make_policy("replicas", PolicyConfig())(replace(snapshot, waiting=(prompt,)), COSTS)
    assert [batch.request_ids for batch in plan.batches] == [("w",)]
    assert not plan.preemptions


def test_somebody_is_where_none_is() -> None:
    policy = make_policy("replicas", PolicyConfig())
    for ending_on in ((), (1,)):
        assert policy(full(2, *ending_on), COSTS).preemptions == (Preemption("r1"),)


def test_all_wait_for_a_lease_whose_instance_a_long_prompt_needs_and_the_lease_ends_early() -> None:
    here, there = decoding("here", 100, (0,), 99), decoding("there", 100, (1,), 99)
    lease = replace(decode([there], (1,), {"there": 1}, num_steps=16), predicted_time=0.02)
    views = [here, there, waiting("long", 100_000)]
    snapshot = snapshot_of([H200_CAPACITY] * 2, views, [running(7, lease)], now=0.001)
    plan = plan_esp(snapshot, H200, PolicyConfig(), ABLATIONS["esp-no-light-apart"])
    assert not plan.batches
    assert [end.batch_id for end in plan.lease_ends] == [7]
