"""Which steps the cost model takes for captured ones, and what these do not cost."""

import pytest
from machines import H200

from loong.core.work import InstanceWork
from loong.scheduler import captured
from loong.scheduler.captured import NOTHING_CAPTURED
from loong.worker import mixed_inputs, mixed_steps

CAPTURED = H200.captured


def test_its_limits_are_those_of_workers() -> None:
    assert CAPTURED.most_rows == mixed_steps._SIZES[-1]
    assert CAPTURED.most_rows_in_group == mixed_inputs.MAX_ROWS
    assert CAPTURED.most_pairs == mixed_inputs._MOST_PAIRS
    assert captured._ALWAYS_ROWS == mixed_inputs._LEAST_COPIED
    assert captured._KEYS_A_ROW == mixed_inputs._KEYS_A_ROW


@pytest.mark.parametrize(
    ("work", "is_captured"),
    [
        (InstanceWork(num_tokens=1024, num_keys=1024), True),
        (InstanceWork(num_tokens=1025, num_keys=1025), False),
        (InstanceWork(num_tokens=2048, num_keys=2048, num_sent_queries=2048), True),
        (InstanceWork(num_tokens=2049, num_keys=2049, num_sent_queries=2049), False),
        (InstanceWork(num_tokens=16, num_keys=16, num_hops=1), False),
        (InstanceWork(num_tokens=200, num_keys=100_000), True),
        (InstanceWork(num_tokens=600, num_keys=10_000), True),
        (InstanceWork(num_tokens=600, num_keys=30_000), False),
    ],
)
def test_a_step_is_captured_up_to_some_rows_and_keys_unless_kv_travels(
    work: InstanceWork, is_captured: bool
) -> None:
    assert CAPTURED.has(work) is is_captured
    assert not NOTHING_CAPTURED.has(work)


def test_a_captured_step_takes_no_launches() -> None:
    few, many = (InstanceWork(num_tokens=n, num_keys=n, num_hops=hops) for n, hops in ((16, 0), (16, 1)))
    assert H200.instance_time(many) - H200.instance_time(few) > H200.coefficients.ring_launch
