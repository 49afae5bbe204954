"""Captured steps of a ring compute about as many rows as there are tokens, however much history they have."""

from hypothesis import given
from hypothesis import strategies as st

from loong.worker.steps.ring_graph import least_size, ring_sizes
from loong.worker.steps.ring_inputs import KV_SIZES

counts = st.integers(1, KV_SIZES[-1] + 1)


@given(num_sizes=st.integers(1, len(KV_SIZES)), tokens=counts, history=st.integers(0, KV_SIZES[-1]))
def test_a_step_has_the_fewest_rows_for_its_tokens_and_room_for_its_history(
    num_sizes: int, tokens: int, history: int
) -> None:
    sizes = KV_SIZES[:num_sizes]
    found = least_size(ring_sizes(sizes), tokens, tokens + history)
    if tokens + history > sizes[-1]:
        assert found is None
    else:
        assert found is not None
        assert found.rows == min(size for size in sizes if size >= tokens)
        assert found.room >= tokens + history
        assert found.room == found.rows or history > 0


def test_no_step_is_captured_without_a_size() -> None:
    assert ring_sizes([]) == []
    assert least_size([], 1, 1) is None


@given(num_sizes=st.integers(1, len(KV_SIZES)))
def test_sizes_ascend_and_few_of_them_are_captured(num_sizes: int) -> None:
    captured = ring_sizes(KV_SIZES[:num_sizes])
    assert captured == sorted(set(captured))
    assert len(captured) <= 3 * num_sizes
