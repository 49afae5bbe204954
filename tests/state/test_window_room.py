"""As many requests may begin as layers with a window have room for."""

from hypothesis import given
from hypothesis import strategies as st
from simulation import instances_with, timed_request

from loong.core.events import RequestArrived
from loong.core.window_memory import WindowMemory
from loong.state.cluster_state import ClusterState

WINDOW = 8


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=30), st.integers(1, 5)
)
def test_all_may_begin_that_have_room_together_in_order(lengths: list[tuple[int, int]], number: int) -> None:
    memory = WindowMemory.of(WINDOW, 2 * WINDOW * number + 2, 1)
    state = ClusterState(instances_with([10_000]), windows=memory)
    for index, (num_prompt, max_tokens) in enumerate(lengths):
        state.apply(RequestArrived(0.0, timed_request(index, num_prompt, max_tokens)))
    snapshot = state.snapshot(0.0)
    held = [memory.num_held(sum(pair)) for pair in lengths]
    num_shown = len(snapshot.waiting)
    assert sum(held[:num_shown]) <= memory.room_of_requests
    assert num_shown == len(held) or sum(held[: num_shown + 1]) > memory.room_of_requests
    assert num_shown >= min(number, len(held))
    assert len(snapshot.following) == len(held) - num_shown
