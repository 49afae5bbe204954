"""Each instance runs the batches that it was told in their order."""

from loong.executor.batch_queue import BatchQueue


def test_a_batch_begins_when_all_its_instances_have_ended_those_before() -> None:
    order = BatchQueue()
    assert order.enqueue(1, (0, 1))
    assert order.enqueue(2, (2,))
    assert not order.enqueue(3, (1, 2))
    assert not order.enqueue(4, (0,))
    assert order.end(2) == []
    assert order.end(1) == [3, 4]
    assert not order.enqueue(5, (2,))
    assert order.enqueue(6, (3,))
    assert order.end(3) == [5]
    assert order.end(4) == []
    assert order.enqueue(7, (0,))


def test_batches_behind_one_another_begin_one_by_one() -> None:
    order = BatchQueue()
    assert [order.enqueue(n, (0,)) for n in (1, 2, 3)] == [True, False, False]
    assert order.end(1) == [2]
    assert order.end(2) == [3]
    assert order.end(3) == []
    assert order.enqueue(4, (0,))
