from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.metrics.prefix_hits import PrefixCache, ideal_hits, prefix_hits
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.request import RequestShape, TokenRun, Turn, WorkloadRequest
from loong.workloads.workload import make_workload

Prompt = Sequence[tuple[int, int]]  # (seed, number of tokens) of each run
prompts = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([16, 24])), min_size=1, max_size=3), max_size=8
)


def shapes(prompts: Sequence[Prompt], num_output_tokens: int = 1) -> list[RequestShape]:
    return [RequestShape(tuple(TokenRun(*run) for run in prompt), num_output_tokens) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "hits"),
    [
        ([[(1, 10)], [(2, 10)]], [0, 0]),
        ([[(1, 10)], [(1, 10)]], [0, 9]),
        ([[(1, 10)], [(1, 30)], [(1, 20)]], [0, 10, 19]),
        ([[(1, 10), (2, 5)], [(1, 10), (3, 5)], [(1, 10), (2, 9)]], [0, 10, 15]),
        ([[(1, 10), (2, 5)], [(1, 8), (2, 5)]], [0, 8]),
        ([[(1, 10), (2, 5)], [(2, 5)]], [0, 0]),
    ],
)
def test_a_hit_is_the_longest_beginning_that_came_before_and_never_the_whole_prompt(
    prompts: Sequence[Prompt], hits: list[int]
) -> None:
    assert list(prefix_hits(shapes(prompts))) == hits


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(prompts=prompts)
def test_a_hit_is_what_the_tokens_themselves_have_in_common(prompts: list[Prompt]) -> None:
    drawn = shapes(prompts)
    tokens = [[t for run in shape.new_runs for t in run.token_ids(2**40)] for shape in drawn]
    expected = [
        min(max((common(prompt, before) for before in tokens[:i]), default=0), len(prompt) - 1)
        for i, prompt in enumerate(tokens)
    ]
    assert list(prefix_hits(drawn)) == expected


def session() -> list[RequestShape]:
    first = RequestShape((TokenRun(1, 10), TokenRun(2, 5)), 8, turn=Turn(7, 0, 3))
    second = RequestShape((TokenRun(3, 6),), 4, turn=Turn(7, 1, 3)).after(first, 8)
    third = RequestShape((TokenRun(4, 2),), 4, turn=Turn(7, 2, 3)).after(second, 4)
    return [first, second, third]


def test_a_later_turn_hits_all_before_it_but_the_last_token_of_the_answer() -> None:
    assert list(prefix_hits(session())) == [0, 15 + 8 - 1, 15 + 8 + 6 + 4 - 1]


def test_an_answer_is_of_the_prompt_before_it_alone() -> None:
    first, second, _ = session()
    other = RequestShape((TokenRun(9, 15),), 8)
    assert list(prefix_hits([other, second, first])) == [0, 0, 14]


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        (30, [0, 0, 9, 9, 0, 0]),  # the second prompt was used longest ago
        (40, [0, 0, 9, 9, 0, 9]),
        (15, [0, 0, 5, 9, 0, 0]),  # the end of a prompt goes first
        (5, [0, 0, 0, 5, 0, 0]),
        (0, [0] * 6),
    ],
)
def test_what_was_used_longest_ago_goes_first_and_from_its_end(capacity: int, hits: list[int]) -> None:
    used = [[(1, 10)], [(2, 10)], [(1, 10)], [(1, 10)], [(3, 20)], [(2, 10)]]
    assert list(prefix_hits(shapes(used), capacity)) == hits


def test_a_shared_beginning_outlives_the_ends_that_follow_it() -> None:
    used = [[(1, 10), (2, 10)], [(1, 10), (3, 10)], [(1, 10), (2, 10)]]
    assert list(prefix_hits(shapes(used), 20)) == [0, 10, 10]
    assert list(prefix_hits(shapes(used), 30)) == [0, 10, 19]


@given(prompts=prompts, num_output=st.integers(1, 4), capacity=st.integers(0, 200))
def test_a_limited_cache_keeps_its_limit_and_never_beats_an_unlimited_one(
    prompts: list[Prompt], num_output: int, capacity: int
) -> None:
    drawn = shapes(prompts, num_output)
    ideal, limited, unlimited = list(prefix_hits(drawn)), PrefixCache(capacity), PrefixCache()
    for shape, best in zip(drawn, ideal, strict=True):
        assert limited.take(shape) <= best
        assert limited.num_tokens <= capacity
        unlimited.take(shape)
    assert list(prefix_hits(drawn, unlimited.num_tokens)) == ideal


def test_of_leval_three_questions_in_four_hit_their_document() -> None:
    drawn = [request.shape for request in make_workload("leval", 40, seed=1)]
    assert sum(map(bool, prefix_hits(drawn))) == 30


def test_the_hits_of_a_run_are_by_the_order_of_sending_in_the_order_of_the_records() -> None:
    sizes, times = (10, 30, 20), (2.0, 1.0, 0.0)
    records = [
        RequestRecord(WorkloadRequest(0.0, shape), 0.0, time, (), 9.0, None, None)
        for shape, time in zip(shapes([[(1, size)] for size in sizes]), times, strict=True)
    ]
    assert ideal_hits(records) == [9, 20, 0]


def test_a_long_session_costs_its_own_tokens_once() -> None:
    drawn = [request.shape for request in make_workload("agents", 400, seed=3)]
    cache = PrefixCache()
    hits = list(accumulate(map(cache.take, drawn)))[-1]
    num_kv = sum(sum(run.num_tokens for run in shape.prompt) + shape.num_output_tokens - 1 for shape in drawn)
    assert cache.num_tokens == num_kv - hits
