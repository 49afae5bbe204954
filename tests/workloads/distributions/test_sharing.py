from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.distributions.sharing import shared_tokens
from loong.workloads.request import RequestShape, TokenRun
from loong.workloads.workload import make_workload

Prompt = Sequence[tuple[int, int]]  # (seed, number of tokens) of each run


def shapes(prompts: Sequence[Prompt]) -> list[RequestShape]:
    return [RequestShape(tuple(TokenRun(*run) for run in prompt), 1) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[(1, 10)], [(2, 10)]], [0, 0]),
        ([[(1, 10)], [(1, 10)]], [0, 10]),
        ([[(1, 10)], [(1, 30)], [(1, 20)]], [0, 10, 20]),
        ([[(1, 10), (2, 5)], [(1, 10), (3, 5)], [(1, 10), (2, 9)]], [0, 10, 15]),
        ([[(1, 10), (2, 5)], [(1, 8), (2, 5)]], [0, 8]),
        ([[(1, 10), (2, 5)], [(2, 5)]], [0, 0]),
    ],
)
def test_what_is_shared_is_the_longest_beginning_that_came_before(
    prompts: Sequence[Prompt], shared: list[int]
) -> None:
    assert list(shared_tokens(shapes(prompts))) == shared


@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([16, 24])), min_size=1, max_size=3), max_size=6
    )
)
def test_it_is_what_the_tokens_themselves_share(prompts: list[Prompt]) -> None:
    drawn = shapes(prompts)
    tokens = [[t for run in shape.prompt for t in run.token_ids(2**40)] for shape in drawn]

    def common(one: list[int], other: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(map(len, (one, other))),
        )

    expected = [
        max((common(tokens[i], before) for before in tokens[:i]), default=0) for i in range(len(tokens))
    ]
    assert list(shared_tokens(drawn)) == expected


def test_of_leval_three_questions_in_four_share_their_document() -> None:
    drawn = [request.shape for request in make_workload("leval", 40, seed=1)]
    assert sum(map(bool, shared_tokens(drawn))) == 30
