"""The queue of groups chooses as its definition says, in any order of prompts."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loong.scheduler.common.least_work import LeastWorkQueue, Load

sizes = st.integers(1, 40)
prompts = st.lists(st.tuples(st.integers(0, 3), sizes, st.integers(0, 4)), max_size=40)


def chosen_of(loads: list[Load], num_tokens: int) -> Load | None:
    """By the definition: least work of those with room, else most room of those that are large enough."""
    if with_room := [load for load in loads if load.room >= num_tokens]:
        return min(with_room, key=lambda load: load.key)
    able = [load for load in loads if load.capacity >= num_tokens]
    return max(able, key=lambda load: (load.room, -load.place), default=None)


@given(st.lists(st.tuples(sizes, st.integers(0, 10)), min_size=1, max_size=5), prompts)
def test_a_prompt_goes_to_the_group_with_least_work_that_has_room_or_to_the_roomiest(
    groups: list[tuple[int, int]], prompts: list[tuple[int, int, int]]
) -> None:
    loads = [Load(place, 2, capacity, capacity - used) for place, (capacity, used) in enumerate(groups)]
    expected = [replace(load) for load in loads]
    queue = LeastWorkQueue(loads)
    for work, num_tokens, begun_at in prompts:
        if begun_at < len(loads):  # a prompt that has begun there comes first
            loads[begun_at].take(work, 0)
            expected[begun_at].take(work, 0)
        chosen = chosen_of(expected, num_tokens)
        if chosen is not None:
            chosen.take(work, num_tokens)
        assert queue.assign(work, num_tokens) == chosen
