"""Log probabilities of a prompt, put together of parts in any order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import InvalidEventError
from loong.core.prompt_logprobs import AssembledLogprobs, PromptLogprobs


def part_of(positions: range, num_top: int = 2) -> PromptLogprobs:
    """Return log probabilities at these positions, different at each."""
    return PromptLogprobs(
        "r",
        positions,
        [-float(p) for p in positions],
        [p + 7 for p in positions],
        [[p * 10 + i for p in positions] for i in range(num_top)],
        [[-p - i / 10 for p in positions] for i in range(num_top)],
    )


@given(st.integers(2, 60), st.data())
def test_stripes_of_chunks_in_any_order_make_the_whole(num_tokens: int, data: st.DataObject) -> None:
    cuts = sorted({1, num_tokens, *data.draw(st.lists(st.integers(1, num_tokens)))})
    parts = [
        range(start + index, stop, dop)
        for start, stop in pairwise(cuts)
        for dop in [data.draw(st.integers(1, 4))]
        for index in range(dop)
    ]
    again = data.draw(st.lists(st.sampled_from(parts)))
    gathered = AssembledLogprobs("r", num_tokens, num_top=2)
    seen: set[int] = set()
    for positions in data.draw(st.permutations([*parts, *again])):
        assert gathered.is_complete == (seen == set(range(1, num_tokens)))
        gathered.add(part_of(positions))
        seen.update(positions)
    assert gathered.is_complete
    assert gathered.whole == part_of(range(1, num_tokens))
    assert gathered.whole.top_at(0, 1) == [(10, -1.0)]


@pytest.mark.parametrize("positions", [range(3), range(4, 10), range(9, 0, -1)])
def test_positions_that_the_prompt_does_not_have_are_refused(positions: range) -> None:
    with pytest.raises(InvalidEventError, match=r"of the prompt of r were scored with 2 of the likeliest"):
        AssembledLogprobs("r", 9, num_top=2).add(part_of(positions))


def test_another_number_of_likeliest_tokens_is_refused() -> None:
    with pytest.raises(InvalidEventError, match=r"with 3 of the likeliest tokens, but .* with 2"):
        AssembledLogprobs("r", 9, num_top=2).add(part_of(range(1, 9), num_top=3))


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidEventError, match=r"2 positions .* columns have \[1, 2\] entries"):
        PromptLogprobs("r", range(1, 3), [-1.0], [1, 2], [], [])
