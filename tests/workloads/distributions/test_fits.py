import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.distributions.fits import LEVAL_QUESTIONS_PER_DOCUMENT, leval, lveval, sharegpt
from loong.workloads.workload import make_workload


@given(num_requests=st.integers(1, 400), seed=st.integers(0, 1000))
def test_mixed_is_a_third_of_each(num_requests: int, seed: int) -> None:
    requests = make_workload("mixed", num_requests, seed=seed)
    assert len(requests) == num_requests
    num_leval = sum(len(r.shape.prompt) == 2 for r in requests)
    num_sharegpt = sum(r.num_prompt_tokens <= 2_300 for r in requests)
    thirds = [num_sharegpt, num_leval, num_requests - num_leval - num_sharegpt]
    assert max(thirds) - min(thirds) <= min(num_requests % 12, 4)


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


def test_leval_documents_are_long_even_where_questions_are_few() -> None:
    [shape] = leval(np.random.default_rng(0), 1)
    assert shape.prompt[0].num_tokens >= 2_700 - shape.prompt[1].num_tokens


def test_lveval_is_even_on_a_log_scale() -> None:
    lengths = [shape.prompt[0].num_tokens for shape in lveval(np.random.default_rng(0), 20_000)]
    middle = math.sqrt(15_100 * 497_300)
    assert np.mean(np.array(lengths) < middle) == pytest.approx(0.5, abs=0.02)
