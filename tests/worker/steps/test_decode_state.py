"""A lease takes the least captured step that has room for its tokens."""

from hypothesis import given
from hypothesis import strategies as st

from loong.core.request import SamplingParams
from loong.worker.steps.decode_state import BATCH_SIZES, GROUP_SIZES, DecodeRow, LeaseBatch

ROW = DecodeRow(0, 0, ("a", ()), range(1), SamplingParams(max_tokens=1))


@given(st.integers(1, BATCH_SIZES[-1]))
def test_a_lease_alone_takes_the_least_size_that_has_room(num_rows: int) -> None:
    batch = LeaseBatch(0, [ROW] * num_rows, {})
    assert batch.size == min(size for size in BATCH_SIZES if size >= num_rows)


@given(st.integers(0, GROUP_SIZES[-1]), st.integers(1, GROUP_SIZES[-1]))
def test_a_group_takes_a_size_that_is_captured_for_groups(num_rows: int, num_peer_rows: int) -> None:
    batch = LeaseBatch(0, [ROW] * num_rows, {1: [("b", ())] * num_peer_rows})
    assert batch.size == min(size for size in GROUP_SIZES if size >= max(num_rows, num_peer_rows))
