"""Where requests can go on if layers with a window have lost KV."""

from hypothesis import given
from hypothesis import strategies as st

from loong.core.placement import CachedKV, KVSegment
from loong.core.window_memory import WindowMemory, ending_before

ranges = st.lists(st.builds(lambda a, n: range(a, a + n), st.integers(0, 40), st.integers(1, 9)), max_size=4)


@given(ranges, st.integers(1, 12), ranges)
def test_a_request_goes_on_where_its_last_window_is_whole(
    cached: list[range], window: int, windowless: list[range]
) -> None:
    parts = [CachedKV(KVSegment("kv", positions, 0), is_read=False) for positions in cached]
    no_ends = WindowMemory(window, window + 1, 1).no_ends(windowless)
    held = {p for part in ending_before(parts, no_ends) for p in part.segment.positions}
    gone = {p for positions in windowless for p in positions}
    end = len(held)
    assert held == set(range(end))
    assert gone.isdisjoint(range(max(0, end - window + 1), end))
    if not gone:
        known = {p for positions in cached for p in positions}
        assert end == next(p for p in range(100) if p not in known)


def test_most_requests_leave_room_for_two_steps() -> None:
    memory = WindowMemory.of(128, 20_000, 4096)
    assert memory.most_requests * 2 * 128 + 2 * 4096 <= memory.capacity


@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 500))
def test_a_request_has_all_of_its_tokens_up_to_two_windows(window: int, number: int, num_tokens: int) -> None:
    memory = WindowMemory.of(window, 2 * (number + window), number)
    assert memory.num_held(num_tokens) <= num_tokens
    assert memory.num_held(num_tokens) <= memory.room_of_requests <= memory.capacity - 2 * number
    assert memory.num_held(num_tokens) == num_tokens or num_tokens > 2 * window
