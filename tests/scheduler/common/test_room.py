"""Room is what requests leave if each goes on to its declared end."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from snapshots import decoding

from loong.core.request import RequestView
from loong.scheduler.common.room import Room

FREE = {0: 100, 1: 80, 2: 80}
views = st.builds(
    lambda num_output, max_tokens, has_ended: replace(
        decoding("a", 20, (0,), max_tokens, num_output), has_ended=has_ended
    ),
    st.integers(1, 9),
    st.integers(9, 99),
    st.booleans(),
)
homes = st.sampled_from([0, 1, 2, 7, None])


@given(st.lists(st.tuples(views, homes)))
def test_spare_slots_are_free_ones_that_no_request_at_home_there_may_need(
    growing: list[tuple[RequestView, int | None]],
) -> None:
    room = Room.left_by(growing, FREE)
    assert room.free == FREE
    for instance_id, num_free in FREE.items():
        at_home = [view for view, home in growing if home == instance_id and not view.has_ended]
        num_needed = sum(
            view.num_prompt_tokens + view.max_tokens - 1 - view.num_computed_tokens for view in at_home
        )
        assert room.spare[instance_id] == num_free - num_needed


def test_kv_that_arrives_takes_free_slots_and_what_is_to_come_takes_spare_ones() -> None:
    room = Room.left_by((), FREE)
    assert (room.freest_id, room.sparest_id) == (0, 0)
    room.take(0, 10, num_to_come=15)
    assert (room.free[0], room.spare[0]) == (90, 75)
    assert (room.freest_id, room.sparest_id) == (0, 1)
    assert FREE[0] == 100
