"""A wrong cost model is reported, with what to do about it."""

from pathlib import Path

import pytest
from ended_batches import ended

from loong.core.cost.work import batch_work
from loong.core.events import BatchFinished
from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.observability.cost_model_alarm import CostModelAlarm
from loong.scheduler.cost.calibration import LARGEST_FACTOR, WINDOW
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.recalibration import Recalibration

BASE = WorkCostModel()
PLACEMENT = Placement((KVSegment("r", range(10), 0),))
DECODE = BatchPlan(
    ESPGroup((0,)),
    (QueryBlock("r", range(10, 11), 0, Transfer.QUERY),),
    (KVSegment("r", range(10, 11), 0),),
)
PREDICTED = BASE.step_time(batch_work(DECODE, {"r": PLACEMENT}, 1)[0][0])


class Loop:
    """Sends batches to a recalibration and its alarm, one at a time."""

    def __init__(self, *, is_applied: bool, cost_model: Path | None = None) -> None:
        recalibration = Recalibration(BASE, is_applied=is_applied)
        self._observers = recalibration, CostModelAlarm(recalibration, cost_model)
        self._ended_at = 0.0

    def run(self, ratio: float, ended_at: float = 0.0) -> None:
        """A decode batch that takes `ratio` times as long as predicted, after those before."""
        self._ended_at = ended_at = max(ended_at, self._ended_at + ratio * PREDICTED)
        batch = RunBatch(1, DECODE, (RequestInput("r", (7,), 10, 1, PLACEMENT, None),))
        for observer in self._observers:
            observer.on_event(BatchFinished(ended_at, 1, 1), ended(batch, ended_at - ratio * PREDICTED))


def test_a_model_that_stays_wrong_is_reported_with_its_factor_and_a_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(is_applied=False)
    for _ in range(WINDOW - 1):
        loop.run(5.0)
    assert not caplog.records
    loop.run(5.0)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "decode batches take 5 times as long" in record.message
    assert "off by a factor of 5 " in record.message
    assert "loong profile --output FILE" in record.message
    assert "--cost-model FILE" in record.message


def test_it_is_reported_again_every_minute_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(is_applied=False)
    for second in range(WINDOW + 125):
        loop.run(0.2, ended_at=float(second))
    assert len(caplog.records) == 3
    for second in range(WINDOW + 125, WINDOW + 300):
        loop.run(1.0, ended_at=float(second))
    assert len(caplog.records) == 3


@pytest.mark.parametrize("ratio", [0.2, 5.0])
def test_an_error_that_is_corrected_is_no_reason_to_warn(
    ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(is_applied=True)
    for _ in range(3 * WINDOW):
        loop.run(ratio)
    assert not caplog.records


def test_after_a_profile_the_remedy_is_another_profile(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(is_applied=False, cost_model=Path("mine.json"))
    for _ in range(WINDOW):
        loop.run(5.0)
    [record] = caplog.records
    assert "`loong profile --output mine.json`" in record.message
    assert "--cost-model" not in record.message


def test_batches_that_are_as_long_as_predicted_in_most_cases_are_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(is_applied=True)
    for number in range(3 * WINDOW):
        loop.run((1.0, 1.0, 100.0, 0.01)[number % 4])
    assert not caplog.records


@pytest.mark.parametrize("ratios", [(0.5, 0.5, 50.0, 0.005), (LARGEST_FACTOR * 3,)])
def test_an_error_that_no_factor_corrects_is_reported(
    ratios: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(is_applied=True)
    for number in range(WINDOW):
        loop.run(ratios[number % len(ratios)])
    assert len(caplog.records) == 1
