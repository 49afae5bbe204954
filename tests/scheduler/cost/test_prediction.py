"""Predictions of many sets of coefficients at once are those of the cost model, one by one."""

from dataclasses import astuple, fields, replace
from functools import cache
from random import Random

import numpy as np
import pytest
from machines import H200_GRAPH_LIMITS
from numba.core.dispatcher import Dispatcher
from profile_samples import profile_samples

from loong.core.cost.work import StepWork
from loong.core.instance import ESPGroup
from loong.scheduler.cost import prediction
from loong.scheduler.cost.cost_model import Coefficients, ServiceLane, WorkCostModel
from loong.scheduler.cost.fit import BatchSample
from loong.scheduler.cost.network import Network
from loong.scheduler.cost.prediction import StepTable


@cache
def steps() -> list[StepWork]:
    """Return steps of every kind, also those that start on an idle device."""
    first, second = (
        [
            work
            for sample in profile_samples(seed)
            if isinstance(sample, BatchSample)
            for work, _ in sample.steps
        ]
        for seed in range(2)
    )
    of_members = first + [replace(work, starts_idle=True) for work in second]
    return of_members + [served(work) for work in of_members if work.group.dop > 1]


def served(work: StepWork) -> StepWork:
    """Return a step of the first instance of a group, which the others serve."""
    return replace(
        work,
        group=ESPGroup(work.group.instance_ids[:1]),
        instances={i: part for i, part in work.instances.items() if i == work.group.leader_id},
        holders={i: part for i, part in work.instances.items() if i != work.group.leader_id},
        idle_holder_ids=frozenset(work.group.instance_ids[1::2]),
    )


def random_models(seed: int, base: WorkCostModel) -> list[WorkCostModel]:
    """Return models in which any coefficient may be 0."""
    random = Random(seed)
    return [
        replace(
            base,
            coefficients=Coefficients(
                *(random.choice((0.0, 1e-6, 1e-3)) * random.random() for _ in fields(Coefficients))
            ),
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize(
    "base",
    [
        WorkCostModel(),
        WorkCostModel(overlap=1.0, lane=ServiceLane(0.004)),
        WorkCostModel(overlap=0.5, graph_limits=H200_GRAPH_LIMITS),
        WorkCostModel(network=Network((0, 1, 1, 0), slowdown=3.0, delay=0.01)),
    ],
    ids=["a processor", "a GPU", "a GPU with captured steps", "two hosts"],
)
def test_a_table_predicts_what_the_cost_model_does(base: WorkCostModel) -> None:
    models = random_models(0, base)
    expected = [[model.step_time(work) for work in steps()] for model in models]
    sets = np.array([astuple(model.coefficients) for model in models])
    np.testing.assert_allclose(StepTable.of(base, steps()).seconds(sets), expected, rtol=1e-12)


def test_machine_code_predicts_what_its_source_does(monkeypatch: pytest.MonkeyPatch) -> None:
    table = StepTable.of(WorkCostModel(), steps())
    sets = np.array([astuple(model.coefficients) for model in random_models(1, WorkCostModel())])
    compiled = table.seconds(sets)
    for name, function in tuple(vars(prediction).items()):
        if isinstance(function, Dispatcher):
            monkeypatch.setattr(prediction, name, function.py_func)
    np.testing.assert_allclose(table.seconds(sets), compiled, rtol=1e-12)
