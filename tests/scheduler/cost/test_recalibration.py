"""A cost model that watches the loop: what it learns, and that it learns the same again."""

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest
from simulation import instances_with, timed_request

from loong.core.applied import Applied
from loong.core.cost.cost_model import prefill_time
from loong.core.cost.work import InstanceWork, Phase, StepWork
from loong.core.events import Event
from loong.core.instance import ESPGroup
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.plan import IterationPlan
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.calibration import Calibration, Kind
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState

BASE = WorkCostModel()
SLOWER = WorkCostModel(Coefficients(*(1.5 * value for value in astuple(BASE.coefficients))))
REQUESTS = [timed_request(number, 20 + 37 * number % 500, 40, 0.05 * number) for number in range(60)]


def run(
    clock: WorkCostModel,
    observers: Sequence[Observer],
    requests: Sequence[Request] = REQUESTS,
    lease_steps: int = 16,
    plan_time: float = 0.0,
) -> None:
    """Serve all requests on two simulated instances."""
    state = ClusterState(instances_with([4096] * 2))
    policy = make_policy("replicas", PolicyConfig(lease_steps=lease_steps))

    async def drain() -> None:
        executor = SimulatedExecutor(clock, requests, plan_time=plan_time)
        async for _ in Scheduling(state, policy, BASE, executor, observers).events():
            pass

    asyncio.run(drain())


class Recording:
    """Keeps the calls of an observer, in order."""

    def __init__(self) -> None:
        self.took: list[
            tuple[Event, Applied] | tuple[Sequence[Event], Snapshot, IterationPlan, Sequence[Instruction]]
        ] = []

    def on_event(self, event: Event, applied: Applied, /) -> None:
        self.took.append((event, applied))

    def on_plan(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        self.took.append((events, snapshot, plan, instructions))

    def report(self, observer: Observer) -> None:
        for reported in self.took:
            if len(reported) == 2:
                observer.on_event(*reported)
            else:
                observer.on_plan(*reported)


def test_a_cluster_that_is_slower_than_predicted_is_predicted_slower() -> None:
    recalibration = Recalibration(BASE)
    run(SLOWER, [recalibration])
    decode = recalibration.calibration.corrections[Kind(Phase.DECODE)]
    assert decode.factor == pytest.approx(1.5, rel=0.1)
    assert recalibration.errors["decode"] < 0.1
    model, factor = (
        RecalibratedCostModel(recalibration),
        recalibration.calibration.corrections[Kind(Phase.PREFILL)].factor,
    )
    assert factor > 1
    assert prefill_time(model, 100, 10, 1) == pytest.approx(factor * prefill_time(BASE, 100, 10, 1))
    work = InstanceWork(num_requests=1, num_tokens=100, num_blocks=1, num_keys=100, num_pairs=5000)
    assert model.instance_time(work) == pytest.approx(factor * BASE.instance_time(work))
    step = StepWork(ESPGroup((0,)), {0: work}, has_ring=False, has_exchange=False)
    assert model.step_time(step) == pytest.approx(factor * BASE.step_time(step))
    assert model.migration_time(1000, 0, 1) == BASE.migration_time(1000, 0, 1)
    assert model.served_time(work) == BASE.served_time(work)
    assert model.host == BASE.host


@pytest.mark.parametrize("plan_time", [0.0, 0.01])
def test_predictions_that_come_true_are_left_as_they_are_however_late_batches_start(plan_time: float) -> None:
    recalibration = Recalibration(BASE)
    run(BASE, [recalibration], plan_time=plan_time)
    for name, error in recalibration.errors.items():
        assert error < 0.02, name
        assert recalibration.calibration.corrections[Kind(Phase(name))].factor == pytest.approx(1, abs=0.02)


def test_errors_are_of_the_model_that_plans_are_made_with() -> None:
    corrected, uncorrected = Recalibration(BASE), Recalibration(BASE, is_applied=False)
    run(SLOWER, [corrected, uncorrected])
    assert corrected.calibration == uncorrected.calibration
    assert corrected.errors["decode"] < 0.1
    assert uncorrected.errors["decode"] == pytest.approx(0.5, rel=0.1)


def test_long_leases_are_predicted_with_the_kv_that_they_make() -> None:
    reading = WorkCostModel(Coefficients(decode_key=1e-3))
    recalibration = Recalibration(reading)
    run(reading, [recalibration], [timed_request(number, 10, 501, 0.0) for number in range(8)], 128)
    assert recalibration.errors["decode"] < 1e-3


def test_a_replay_of_events_and_plans_learns_the_same() -> None:
    first, recording, again = Recalibration(BASE), Recording(), Recalibration(BASE)
    run(SLOWER, [first, recording])
    recording.report(again)
    assert again.calibration == first.calibration != Calibration()


def test_what_a_rest_costs_is_part_of_what_is_predicted() -> None:
    dear = replace(BASE.coefficients, idle_start=0.5)
    recalibration = Recalibration(replace(BASE, coefficients=dear))
    seldom = [timed_request(number, 20, 10, float(number + 1)) for number in range(20)]
    run(WorkCostModel(dear), [recalibration], seldom)
    assert recalibration.errors["prefill"] == pytest.approx(0.0, abs=1e-6)
