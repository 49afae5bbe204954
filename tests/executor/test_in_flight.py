"""A batch goes from stage to stage only along the arrows of `loong.executor.in_flight`."""

import re
from itertools import product

import pytest

from loong.core.errors import InvalidEventError
from loong.core.instance import ESPGroup
from loong.core.instructions import RunBatch
from loong.core.plan import BatchPlan
from loong.executor.in_flight import InFlight, Stage, SubmittedBatch
from loong.messages.wire import BatchBegun, BatchDone, StepDone

WORKERS = ((0, 0), (0, 1), (2, 0), (2, 1))
ARROWS = {
    (Stage.QUEUED, Stage.SENT),
    (Stage.QUEUED, Stage.VOID),
    (Stage.SENT, Stage.ENDED),
    (Stage.SENT, Stage.VOID),
    (Stage.ENDED, Stage.REPORTED),
    (Stage.VOID, Stage.LEFT),
    (Stage.LEFT, Stage.REPORTED),
}


def submitted(stage: Stage = Stage.QUEUED) -> SubmittedBatch:
    return SubmittedBatch(RunBatch(7, BatchPlan(ESPGroup((0, 2)), (), ()), ()), stage)


@pytest.mark.parametrize(("before", "after"), [*product(Stage, Stage)])
def test_every_move_is_an_arrow_or_an_error(before: Stage, after: Stage) -> None:
    batch = submitted(before)
    if (before, after) in ARROWS:
        batch.move_to(after)
        assert batch.stage is after
    else:
        message = f"batch 7 is {before.value}, so it cannot become {after.value}"
        with pytest.raises(InvalidEventError, match=re.escape(message)):
            batch.move_to(after)
        assert batch.stage is before


def test_a_batch_has_ended_with_the_last_report_of_its_end() -> None:
    batch = submitted()
    batch.send(WORKERS)
    for worker_id in WORKERS[:-1]:
        assert not batch.take_done(BatchDone(7, *worker_id, 3, began_at=5.0 + worker_id[0], ended_at=9.0))
        assert batch.stage is Stage.SENT
    assert batch.take_done(BatchDone(7, *WORKERS[-1], 3, began_at=6.0, ended_at=9.5))
    assert (batch.stage, batch.seconds) == (Stage.ENDED, 2.5)


def test_only_workers_that_have_not_reported_the_end_of_a_batch_may_report_of_it() -> None:
    batch = submitted()
    assert not batch.expects(StepDone(7, 0, ()))
    assert not batch.expects(BatchBegun(7, 0, 0))
    batch.send(WORKERS)
    assert batch.expects(StepDone(7, 0, ()))
    batch.take_done(BatchDone(7, 0, 0, 1))
    assert not batch.expects(BatchDone(7, 0, 0, 1))
    assert batch.expects(BatchBegun(7, 0, 1))


def test_a_batch_starts_once_when_its_last_instance_has_begun_it() -> None:
    batch = submitted()
    assert not batch.start(), "it was not sent"
    batch.send(WORKERS)
    assert not batch.has_begun_on(2)
    assert not batch.starts_on(2)
    assert not batch.starts_on(2)
    assert batch.has_begun_on(2)
    assert batch.starts_on(0)
    assert [batch.start(), batch.start()] == [True, False]
    assert not batch.has_begun_on(2), "it has started"


def test_a_void_batch_is_forgotten_when_it_is_reported_but_for_its_id() -> None:
    in_flight = InFlight()
    for batch_id in (1, 2):
        in_flight.add(RunBatch(batch_id, BatchPlan(ESPGroup((0,)), (), ()), ()))
    in_flight.void(in_flight[1])
    in_flight.forget_reported()
    assert list(in_flight) == [1, 2]
    in_flight[1].move_to(Stage.LEFT)
    in_flight[1].move_to(Stage.REPORTED)
    in_flight.forget_reported()
    assert list(in_flight) == [2]
    assert in_flight.void_ids == {1}
