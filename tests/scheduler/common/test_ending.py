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
from loong.scheduler.esp.policy import plan_esp
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


def test_who_decodes_until_others_come_free_has_the_time_from_the_end_of_its_batch_on() -> None:
    here, there = decoding("here", 100, (0,), 99), decoding("there", 100, (1,), 99)
    lease = replace(decode([there], (1,), {"there": 1}, num_steps=16), predicted_time=0.02)
    views = [here, there, waiting("long", 100_000)]
    snapshot = snapshot_of([H200_CAPACITY] * 2, views, [running(7, lease)], now=0.001)
    gone = replace(decode([GONE], (0,), {"gone": 0}), predicted_time=0.012)
    for ending, seconds in (((), 0.019), ((running(3, gone),), 0.008)):
        (meanwhile,) = plan_esp(replace(snapshot, ending=ending), H200, PolicyConfig()).batches
        assert meanwhile.request_ids == ("here",)
        assert meanwhile.predicted_time is not None
        assert seconds - 2 * meanwhile.predicted_time < meanwhile.num_steps * meanwhile.predicted_time
        assert meanwhile.num_steps * meanwhile.predicted_time <= seconds
