"""The ends of leases as a worker receives them."""

from threading import Thread

import pytest

from loong.core.errors import ClusterError
from loong.core.instance import ESPGroup
from loong.core.instructions import RunBatch
from loong.core.plan import BatchPlan
from loong.worker.batches.lease_ends import LeaseEnds


def lease(batch_id: int, num_steps: int) -> RunBatch:
    return RunBatch(batch_id, BatchPlan(ESPGroup((0,)), (), (), num_steps), ())


def test_a_lease_ends_after_its_last_step_unless_it_is_reported_otherwise() -> None:
    ends = LeaseEnds(deadline=0.0)
    end, other = ends.of(lease(1, 16)), ends.of(lease(2, 9))
    assert (end.step(), other.step()) == (16, 9)
    ends.extend(1, 32)
    assert (end.step(), other.step()) == (32, 9)
    ends.stop(1, 20)
    ends.stop(1, 25)
    assert (end.step(), other.step()) == (20, 9)


def test_what_is_over_is_forgotten() -> None:
    ends = LeaseEnds(deadline=0.0)
    for batch_id in (1, 2, 3):
        ends.extend(batch_id, 32)
        ends.stop(batch_id, 30)
    ends.forget_up_to(2)
    assert [ends.of(lease(batch_id, 16)).step() for batch_id in (1, 2, 3)] == [16, 16, 30]


def test_steps_that_others_heard_of_first_are_waited_for() -> None:
    ends = LeaseEnds(deadline=60.0)
    end = ends.of(lease(1, 16))
    end.wait_for_room(16)
    ends.extend(1, 32)
    ends.stop(1, 20)
    end.wait_for_room(32)  # it had been extended, before later instructions
    waiting = Thread(target=end.wait_for_room, args=(48,))
    waiting.start()
    ends.extend(1, 48)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_who_never_hears_of_steps_that_others_take_fails() -> None:
    with pytest.raises(ClusterError, match="batch 1 goes on up to step 17 elsewhere"):
        LeaseEnds(deadline=0.0).of(lease(1, 16)).wait_for_room(17)
