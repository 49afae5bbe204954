"""Laws of the comparison of a stream with the undisturbed output."""

from hypothesis import given
from hypothesis import strategies as st

from loong.launcher.chaos.differences import Differences, differences

OUTPUTS = st.lists(st.integers(0, 5), max_size=12)  # few tokens, so that outputs repeat themselves
UNKNOWN = 99  # in no output


def of(expected: list[int], received: list[int]) -> Differences:
    return differences(expected, received, is_complete=True)


@given(OUTPUTS, OUTPUTS)
def test_only_an_equal_stream_has_no_differences(expected: list[int], received: list[int]) -> None:
    assert bool(of(expected, received)) == (expected != received)


@given(OUTPUTS, OUTPUTS)
def test_tokens_are_conserved(expected: list[int], received: list[int]) -> None:
    found = of(expected, received)
    assert found.num_lost - found.num_repeated == len(expected) - len(received)
    assert 0 <= found.num_all <= max(len(expected), len(received))
    assert min(found.num_lost, found.num_repeated, found.num_changed) >= 0


@given(OUTPUTS, st.data())
def test_every_token_that_is_left_out_is_lost(expected: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected)))
    received = [token for token, is_kept in zip(expected, kept, strict=True) if is_kept]
    assert of(expected, received) == Differences(num_lost=kept.count(False))


@given(OUTPUTS, st.data())
def test_tokens_that_come_again_are_repeated(expected: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(expected)))
    start = data.draw(st.integers(0, end))
    received = expected[:end] + expected[start:]
    assert of(expected, received) == Differences(num_repeated=end - start)


@given(OUTPUTS, st.data())
def test_every_other_token_is_changed(expected: list[int], data: st.DataObject) -> None:
    are_changed = data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected)))
    received = [
        UNKNOWN if is_changed else token for token, is_changed in zip(expected, are_changed, strict=True)
    ]
    assert of(expected, received) == Differences(num_changed=are_changed.count(True))


@given(OUTPUTS, st.integers(0, 12))
def test_a_stream_that_is_cut_off_has_lost_nothing_that_was_due(expected: list[int], length: int) -> None:
    assert not differences(expected, expected[:length], is_complete=False)


@given(OUTPUTS, OUTPUTS)
def test_a_stream_that_is_cut_off_is_like_some_beginning(expected: list[int], received: list[int]) -> None:
    beginnings = (of(expected[:length], received) for length in range(len(expected) + 1))
    fewest = min(found.num_all for found in beginnings)
    assert differences(expected, received, is_complete=False).num_all == fewest


def test_a_repeated_token_in_an_output_of_full_length_pushes_out_the_last_one() -> None:
    assert of([1, 2, 3, 4], [1, 2, 2, 3]) == Differences(num_lost=1, num_repeated=1)
