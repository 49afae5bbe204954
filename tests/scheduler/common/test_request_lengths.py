"""Columns say of all requests what each says of itself."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from snapshots import decoding, waiting

from loong.core.placement import BorrowedKV, Placement
from loong.core.request import RequestView
from loong.scheduler.common.request_lengths import Lengths

VIEWS = st.lists(
    st.one_of(
        st.builds(waiting, st.text(max_size=2), st.integers(1, 99), st.integers(1, 99)),
        st.builds(decoding, st.just("d"), st.integers(1, 99), st.just((0,)), st.just(99), st.integers(1, 98)),
        st.builds(lambda n: replace(waiting("leader", 9, 9), num_siblings=n), st.integers(1, 3)),
        st.just(replace(decoding("member", 9, (0,)), borrowed=(BorrowedKV("kv", Placement()),))),
    )
)


@given(VIEWS, VIEWS)
def test_columns_can_be_made_one_after_the_other(first: list[RequestView], others: list[RequestView]) -> None:
    one_by_one, together = Lengths.of(first).adding(others), Lengths.of(first + others)
    assert list(one_by_one.views) == together.views
    assert one_by_one.kin == together.kin
    for column in ("known", "remaining", "final"):
        assert getattr(one_by_one, column).tolist() == getattr(together, column).tolist()


@given(VIEWS)
def test_columns_hold_what_each_view_says(views: list[RequestView]) -> None:
    lengths = Lengths.of(views)
    assert lengths.known.tolist() == [view.num_known_tokens for view in views]
    assert lengths.remaining.tolist() == [view.num_remaining_tokens for view in views]
    assert lengths.final.tolist() == [view.num_final_tokens for view in views]
    assert lengths.kin == {i: view for i, view in enumerate(views) if view.num_siblings or view.borrowed}
