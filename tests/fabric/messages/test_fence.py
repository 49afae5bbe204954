"""Late messages are dropped and early ones are kept, with any other batches open."""

import pytest

from loong.fabric.errors import InvalidMessageError
from loong.fabric.messages.fence import AnyOrderFence, GrowingFence


def test_ids_that_grow_leave_behind_what_was_never_opened() -> None:
    fence = GrowingFence("batch")
    fence.open(4)
    assert [fence.is_stale(i) for i in (3, 4, 5)] == [True, False, False]
    fence.open(6)
    assert [fence.is_stale(i) for i in (4, 5, 6)] == [False, True, False]
    fence.close(4)
    assert fence.is_stale(4)
    with pytest.raises(InvalidMessageError, match="batch 5 after batch 6"):
        fence.open(5)


def test_what_is_served_is_opened_in_any_order_and_once() -> None:
    fence = AnyOrderFence("served batch")
    fence.open(6)
    fence.close(6)
    assert [fence.is_stale(i) for i in (5, 6, 7)] == [False, True, False]
    fence.open(5)
    for its_id in (5, 6):
        with pytest.raises(InvalidMessageError, match=f"served batch {its_id} is opened twice"):
            fence.open(its_id)


def test_what_was_served_long_ago_is_forgotten_but_never_comes_back() -> None:
    fence = AnyOrderFence("served batch")
    fence.open(2)
    for its_id in range(3, 10_000):
        fence.open(its_id)
        fence.close(its_id)
    assert [fence.is_stale(i) for i in (1, 2, 3, 9_999, 10_000)] == [True, False, True, True, False]
