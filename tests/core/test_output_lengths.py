from hypothesis import given
from hypothesis import strategies as st

from loong.core.output_lengths import LEAST_OBSERVED, bin_of, expected_lengths, longest_of
from loong.state.observed_lengths import WINDOW, ObservedLengths

lengths = st.integers(1, 2**20)


@given(lengths)
def test_bins_are_in_order_and_each_ends_where_the_next_begins(length: int) -> None:
    number = bin_of(length)
    assert longest_of(number) >= length == longest_of(number - 1) + 1 or bin_of(length - 1) == number
    assert bin_of(longest_of(number)) == number == bin_of(longest_of(number) + 1) - 1
    assert longest_of(number) - length <= length / 8


@given(st.lists(lengths, min_size=LEAST_OBSERVED, max_size=60), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_share_of_the_outputs_that_are_as_long_already_end_by_the_expected_length(
    observed: list[int], share: float
) -> None:
    lengths = ObservedLengths()
    for length in observed:
        lengths.add(2**20, length)
    (counts,) = lengths.counts.values()
    for number, expected in enumerate(expected_lengths(counts, share)):
        longer = [length for length in observed if bin_of(length) >= number]
        assert expected >= longest_of(number)
        assert sum(length <= expected for length in longer) >= share * len(longer) > 0


def test_nothing_is_expected_of_a_maximum_that_few_have_declared() -> None:
    lengths = ObservedLengths()
    for _ in range(LEAST_OBSERVED - 1):
        lengths.add(100, 7)
    assert expected_lengths(lengths.counts[7], 0.9) == ()


def test_recent_lengths_count_most_and_rare_ones_are_not_forgotten() -> None:
    lengths = ObservedLengths()
    lengths.add(1000, 900)
    for _ in range(4 * WINDOW):
        lengths.add(1000, 100)
    for _ in range(WINDOW):
        lengths.add(1000, 10)
    (counts,) = lengths.counts.values()
    assert sum(counts) < WINDOW
    assert expected_lengths(counts, 0.5)[0] == longest_of(bin_of(10))
    assert counts[bin_of(900)] == 1
