"""A pool with fewer slots in layers with a window."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import InvalidPlanError
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.worker.kv.pool import KVPool

WINDOWS = (4, None, 4, 8, None)
LAYOUT = KVLayout(len(WINDOWS), row_of_heads(1, 2), "float32", WINDOWS)
NUM_SLOTS, NUM_WINDOW_SLOTS = 40, 16
IN_WINDOW = [layer for layer, window in enumerate(WINDOWS) if window is not None]


def make_pool() -> KVPool:
    """Return a pool whose memory is all NaN."""
    pool = KVPool(LAYOUT, NUM_SLOTS, torch.device("cpu"), num_window_slots=NUM_WINDOW_SLOTS)
    for layer in range(LAYOUT.num_layers):
        pool.layer(layer).fill_(torch.nan)
    return pool


def numbered(positions: range) -> torch.Tensor:
    """Return KV [num_layers, n, 2, 1, 2] that is different for each position and layer."""
    numbers = torch.tensor([[p * len(WINDOWS) + layer for p in positions] for layer in range(len(WINDOWS))])
    return numbers.float()[:, :, None, None, None].expand(-1, -1, 2, 1, 2).contiguous()


def test_layers_with_a_window_have_memory_for_fewer_tokens() -> None:
    pool = make_pool()
    rows = [len(pool.layer(layer)) for layer in range(len(WINDOWS))]
    assert rows == [NUM_SLOTS if window is None else NUM_WINDOW_SLOTS + 1 for window in WINDOWS]


def test_more_tokens_than_slots_of_windows_keep_their_kv_in_other_layers() -> None:
    pool = make_pool()
    for first in range(0, NUM_SLOTS, 10):
        new = range(first, first + 10)
        pool.scatter(pool.allocate("a", new), numbered(new))
        pool.release_windows("a", range(first + 4))
    kv, wanted = pool.gather(pool.slots("a", range(NUM_SLOTS))), numbered(range(NUM_SLOTS))
    for layer, window in enumerate(WINDOWS):
        kept = range(NUM_SLOTS) if window is None else range(NUM_SLOTS - 6, NUM_SLOTS)
        assert torch.equal(kv[layer][kept], wanted[layer][kept])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(1, 8)), max_size=12))
def test_no_slot_of_a_window_is_lost_or_given_twice(commands: list[tuple[str, int, int]]) -> None:
    pool, has_window = make_pool(), dict[tuple[str, int], bool]()
    for number, (owner_id, first, length) in enumerate(commands):
        positions = range(first, first + length)
        new = [p for p in positions if (owner_id, p) not in has_window]
        if number % 3 == 2:
            pool.release_windows(owner_id, positions)
            has_window.update({key: False for p in positions if (key := (owner_id, p)) in has_window})
        elif number % 5 == 4:
            pool.release(owner_id)
            has_window = {key: has for key, has in has_window.items() if key[0] != owner_id}
        elif new == [*positions]:
            try:
                pool.allocate(owner_id, positions, windowless=(range(first + 2),))
            except InvalidPlanError:
                continue
            has_window.update({(owner_id, p): p >= first + 2 for p in positions})
        taken = [
            int(slot)
            for (its_owner, p), has in has_window.items()
            if has
            for slot in pool.of_window(4).slots(its_owner, range(p, p + 1))
        ]
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < NUM_WINDOW_SLOTS for slot in taken)
    for owner_id in "abc":
        pool.release(owner_id)
    pool.allocate("all", range(NUM_WINDOW_SLOTS))  # as many as ever are free


def test_what_has_no_room_in_layers_with_a_window_takes_nothing() -> None:
    pool = make_pool()
    with pytest.raises(InvalidPlanError, match="layers with a window"):
        pool.allocate("a", range(NUM_WINDOW_SLOTS + 1))
    with pytest.raises(InvalidPlanError, match="layers with a window"):
        pool.allocate_few_each([("a", range(9)), ("b", range(9))])
    assert pool.num_used == 0
    pool.allocate("a", range(NUM_SLOTS), windowless=(range(NUM_SLOTS - NUM_WINDOW_SLOTS),))


def test_a_shared_slot_has_its_window_until_that_is_released() -> None:
    pool = make_pool()
    pool.scatter(pool.allocate("a", range(6)), numbered(range(6)))
    pool.share("a", "b", range(6))
    pool.release("a")
    kv = pool.gather(pool.slots("b", range(6)))
    assert torch.equal(kv, numbered(range(6)))
    pool.release_windows("b", range(6))
    assert torch.equal(pool.gather(pool.slots("b", range(6)))[1], numbered(range(6))[1])
    pool.allocate("c", range(NUM_WINDOW_SLOTS))
