"""A snapshot in parts has everything once, where it belongs."""

from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.instance import ESPGroup
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.scheduler.common.cluster_parts import groups_of, homes_of, split


def test_groups_are_of_consecutive_ids_and_a_loss_leaves_the_others_as_they_are() -> None:
    assert groups_of((0, 1, 2, 3), 2) == ((0, 1), (2, 3))
    assert groups_of((0, 2, 3), 2) == ((0,), (2, 3))
    assert groups_of((0, 1, 2), 1) == ((0,), (1,), (2,))
    assert groups_of((), 4) == ()


def test_every_request_and_every_batch_is_in_the_part_of_its_instances() -> None:
    views = [
        waiting("w0", 5),
        waiting("w1", 5),
        waiting("w2", 5),
        decoding("d", 9, (1, 0)),
        begun("p", 9, 4, (2,)),
    ]
    block = QueryBlock("p", range(4, 9), 2, Transfer.KV)
    batch = running(1, BatchPlan(ESPGroup((2, 3)), (block,), ()))
    snapshot = snapshot_of([50, 50, 70, 80], views, [batch])
    parts = ((0, 1), (2, 3))
    first, second = split(snapshot, parts, {"w0": 1, "w2": 0, **homes_of(snapshot, parts)})
    assert [view.request_id for view in (*first.waiting, *first.running)] == ["w2", "d"]
    assert [view.request_id for view in (*second.waiting, *second.running)] == ["w0", "p"]
    assert (first.pools, second.pools) == ({0: 50, 1: 50}, {2: 70, 3: 80})
    assert (first.batches, second.batches) == ((), (batch,))


def test_a_first_chunk_in_flight_is_in_the_part_of_its_batch() -> None:
    block = QueryBlock("new", range(9), 1, Transfer.KV)
    batch = running(1, BatchPlan(ESPGroup((1,)), (block,), ()))
    assert homes_of(snapshot_of([50, 50], [waiting("new", 9)], [batch]), ((0,), (1,))) == {"new": 1}


def test_a_request_is_in_the_part_with_its_oldest_kv() -> None:
    views = [begun("partly", 9, 4, (3, 1)), begun("outside", 9, 4, (3,)), begun("inside", 9, 4, (0,))]
    assert homes_of(snapshot_of([50] * 4, views), ((0,), (1, 2))) == {"partly": 1, "inside": 0}
