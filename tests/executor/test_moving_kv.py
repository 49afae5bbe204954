import pytest

from loong.core.placement import KVSegment
from loong.core.plan import KVMigration
from loong.executor.moving_kv import MovingKV
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel

MODEL = WorkCostModel(Coefficients(message=1.0, moved_key=0.1, kept_key=0.02))


def move(num_tokens: int, source_id: int, destination_id: int) -> KVMigration:
    return KVMigration(KVSegment("r", range(num_tokens), source_id), destination_id)


def test_moves_share_the_link_into_their_destination_and_the_one_out_of_their_source() -> None:
    moving = MovingKV(MODEL)
    assert [moving.start(move(10, source_id, 9), 5.0)[0] for source_id in (0, 1, 2)] == [7.0, 8.0, 9.0]
    assert moving.start(move(10, 0, 8), 5.0)[0] == 8.0  # after the move of 1 s from there
    assert moving.start(move(10, 9, 7), 5.0)[0] == 7.0  # what leaves has a link of its own
    assert moving.start(move(10, 5, 9), 20.0)[0] == 22.0


def test_a_step_loses_time_to_each_link_in_use_and_none_afterwards() -> None:
    moving = MovingKV(MODEL)
    moving.start(move(100, 0, 1), 0.0)
    assert moving.lost_share == pytest.approx(0.02 / 0.1, rel=1e-3)
    assert moving.lost_seconds(0, 4.0, 6.0) == moving.lost_seconds(1, 4.0, 6.0)
    assert moving.lost_seconds(1, 4.0, 6.0) == pytest.approx(2 * moving.lost_share)
    assert moving.lost_seconds(1, 8.0, 20.0) == pytest.approx(2 * moving.lost_share)
    assert moving.lost_seconds(2, 4.0, 6.0) == 0.0
    moving.start(move(100, 1, 0), 0.0)
    assert moving.lost_seconds(1, 4.0, 6.0) == pytest.approx(4 * moving.lost_share)
