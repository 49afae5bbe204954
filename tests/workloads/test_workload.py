import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.workloads.request import MIN_OUTPUT_TOKENS, MIN_PROMPT_TOKENS, TokenRun
from loong.workloads.workload import (
    LEVAL_QUESTIONS_PER_DOCUMENT,
    WORKLOADS,
    leval,
    lveval,
    make_workload,
    own_pace,
    sharegpt,
)

PROMPT_RANGES = {
    "sharegpt": (4, 2_300),
    "leval": (2_700, 210_500),
    "lveval": (15_100, 497_300),
    "mixed": (4, 497_300),
    "zipf1.0": (10, 200_000),
    "zipf1.2": (10, 200_000),
    "zipf1.4": (10, 200_000),
    "victim-attacker": (512, 500_000),
}


def test_every_workload_has_a_published_range() -> None:
    assert set(PROMPT_RANGES) == set(WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_keep_to_the_published_range(name: str) -> None:
    low, high = PROMPT_RANGES[name]
    for request in make_workload(name, 300, seed=1):
        assert low <= request.num_prompt_tokens <= high
        assert MIN_OUTPUT_TOKENS <= request.num_output_tokens <= 1_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_names_one_workload(name: str) -> None:
    def make(seed: int) -> list[object]:
        requests = make_workload(name, 40, seed=seed, request_rate=3.0, length_scale=1 / 64)
        return [(r, r.prompt_token_ids(500)) for r in requests]

    assert make(7) == make(7)
    assert make(7) != make(8)


def test_another_rate_leaves_the_prompts_as_they_are() -> None:
    slow, fast = (make_workload("mixed", 30, seed=2, request_rate=rate) for rate in (1.0, 10.0))
    assert [r.shape for r in slow] == [r.shape for r in fast]
    assert [r.arrival_time for r in slow] == pytest.approx([10 * r.arrival_time for r in fast])


@given(num_requests=st.integers(1, 400), seed=st.integers(0, 1000))
def test_mixed_is_a_third_of_each(num_requests: int, seed: int) -> None:
    requests = make_workload("mixed", num_requests, seed=seed)
    assert len(requests) == num_requests
    num_leval = sum(len(r.shape.prompt) == 2 for r in requests)
    num_sharegpt = sum(r.num_prompt_tokens <= 2_300 for r in requests)
    thirds = [num_sharegpt, num_leval, num_requests - num_leval - num_sharegpt]
    assert max(thirds) - min(thirds) <= min(num_requests % 12, 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_longer_run_begins_as_the_shorter_one(name: str) -> None:
    short, long = (make_workload(name, n, seed=4, request_rate=2.0) for n in (310, 700))
    assert long[:310] == short


def test_sharegpt_has_the_published_means() -> None:
    shapes = sharegpt(np.random.default_rng(0), 20_000)
    assert np.mean([shape.prompt[0].num_tokens for shape in shapes]) == pytest.approx(161, rel=0.05)
    assert np.mean([shape.num_output_tokens for shape in shapes]) == pytest.approx(338, rel=0.05)


def test_consecutive_questions_share_their_document() -> None:
    requests = make_workload("leval", 12, seed=3, length_scale=1 / 64)
    prompts = [request.prompt_token_ids(1000) for request in requests]
    for first in range(0, 12, LEVAL_QUESTIONS_PER_DOCUMENT):
        group = range(first, first + LEVAL_QUESTIONS_PER_DOCUMENT)
        num_shared = requests[first].shape.prompt[0].num_tokens
        assert len({tuple(prompts[index][:num_shared]) for index in group}) == 1
        assert len({tuple(prompts[index]) for index in group}) == len(group)


def test_lveval_is_even_on_a_log_scale() -> None:
    lengths = [shape.prompt[0].num_tokens for shape in lveval(np.random.default_rng(0), 20_000)]
    middle = math.sqrt(15_100 * 497_300)
    assert np.mean(np.array(lengths) < middle) == pytest.approx(0.5, abs=0.02)


def test_a_steeper_zipf_has_shorter_prompts() -> None:
    means = [
        np.mean([r.num_prompt_tokens for r in make_workload(name, 2_000, seed=0)])
        for name in ("zipf1.0", "zipf1.2", "zipf1.4")
    ]
    assert means[0] > means[1] > means[2]


def test_victims_come_every_tenth_of_a_second_with_an_attacker_every_half_minute() -> None:
    rate, burstiness = own_pace("victim-attacker")
    requests = make_workload("victim-attacker", 700, seed=0, request_rate=rate, burstiness=burstiness)
    assert [r.arrival_time for r in requests] == pytest.approx([index / 10 for index in range(700)])
    assert [r.arrival_time for r in requests if r.num_prompt_tokens == 500_000] == [0.5, 30.5, 60.5]
    assert Counter(r.num_prompt_tokens for r in requests) == {512: 697, 500_000: 3}


@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    scale=st.fractions(Fraction(1, 4096), 1),
    seed=st.integers(0, 50),
)
def test_a_length_scale_shrinks_every_length_and_leaves_something_to_measure(
    name: str, scale: Fraction, seed: int
) -> None:
    full = make_workload(name, 8, seed=seed)
    small = make_workload(name, 8, seed=seed, length_scale=float(scale))
    for before, after in zip(full, small, strict=True):
        assert MIN_PROMPT_TOKENS <= after.num_prompt_tokens <= before.num_prompt_tokens
        assert MIN_OUTPUT_TOKENS <= after.num_output_tokens <= before.num_output_tokens


@given(seed=st.integers(0, 2**63), sizes=st.tuples(st.integers(1, 500), st.integers(1, 500)))
def test_of_two_runs_with_one_seed_the_shorter_is_a_prefix(seed: int, sizes: tuple[int, int]) -> None:
    short, long = sorted(sizes)
    assert TokenRun(seed, long).token_ids(321)[:short] == TokenRun(seed, short).token_ids(321)


@given(vocab_size=st.integers(1, 200_000))
def test_token_ids_are_in_the_vocabulary(vocab_size: int) -> None:
    assert all(0 <= token_id < vocab_size for token_id in TokenRun(1, 64).token_ids(vocab_size))


def test_leval_documents_are_long_even_where_questions_are_few() -> None:
    [shape] = leval(np.random.default_rng(0), 1)
    assert shape.prompt[0].num_tokens >= 2_700 - shape.prompt[1].num_tokens


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "nonsense"}, "choose from sharegpt"),
        ({"num_requests": 0}, "--num-requests 0"),
        ({"length_scale": 0.0}, "--length-scale 0"),
        ({"length_scale": 2.0}, "--length-scale 2"),
        ({"request_rate": 0.0}, "--request-rate 0"),
        ({"request_rate": 1.0, "burstiness": -1.0}, "--burstiness -1"),
    ],
)
def test_a_wrong_value_is_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_workload(**{"name": "mixed", "num_requests": 4, "seed": 0, **arguments})  # type: ignore[arg-type]
