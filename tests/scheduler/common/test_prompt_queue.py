"""Requests sorted into the queues of parts."""

from dataclasses import replace

from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.request import RequestView
from loong.scheduler.common.prompt_queue import queues_of


def ids(views: list[RequestView]) -> list[str]:
    return [view.request_id for view in views]


def test_each_part_has_its_own_requests_in_their_order() -> None:
    views = [
        waiting("w0", 5),
        waiting("w1", 5),
        waiting("w2", 5),
        decoding("d", 9, (0,)),
        begun("p", 9, 4, (0,)),
    ]
    snapshot = snapshot_of([50, 60, 70], views)
    queues = queues_of(snapshot, ((0,), (1, 2)), {"w1": 1, "w2": 0, "w0": 1, "d": 0, "p": 0})
    assert [(place, queue.num_instances, queue.capacity) for place, queue in queues.items()] == [
        (1, 2, 130),
        (0, 1, 50),
    ]
    assert [ids([*queue.waiting]) for queue in queues.values()] == [["w0", "w1"], ["w2"]]
    assert [ids([*queue.running]) for queue in queues.values()] == [[], ["d", "p"]]
    assert [ids([*queue.begun]) for queue in queues.values()] == [[], ["p"]]
    assert [queue.is_any_plannable for queue in queues.values()] == [False, True]


def test_requests_without_a_part_and_parts_without_a_request_are_left_out() -> None:
    moving = replace(begun("moving", 9, 4, (0,)), is_migrating=True)
    snapshot = snapshot_of([50, 60], [waiting("w", 5), moving])
    (queue,) = queues_of(snapshot, ((0,), (1,)), {"moving": 0}).values()
    assert (ids([*queue.requests]), ids([*queue.begun]), queue.is_any_plannable) == (["moving"], [], False)
