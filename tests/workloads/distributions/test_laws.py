from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from loong.core.errors import ConfigError
from loong.workloads.distributions.laws import Beta, Fixed, Law, LogNormal, Skewed, Uniform, Zipf
from loong.workloads.named import LAWS
from loong.workloads.request import RequestShape

NUM_DRAWN = 30_000


def drawn(law: Law, number: int = NUM_DRAWN) -> list[RequestShape]:
    return list(islice(law.shapes(np.random.SeedSequence(1)), number))


def prompts(shapes: Sequence[RequestShape]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array([shape.prompt[0].num_tokens for shape in shapes])


def test_fixed_lengths_are_fixed() -> None:
    shapes = drawn(Fixed(1000, output=500), 400)
    assert {(shape.prompt[0].num_tokens, shape.num_output_tokens) for shape in shapes} == {(1000, 500)}
    assert len({shape.new_runs[0].seed for shape in shapes}) == 400


def test_without_an_output_answers_are_those_of_a_chat_or_a_document_question() -> None:
    chats, questions = (
        np.mean([s.num_output_tokens for s in drawn(Fixed(size), 6_000)]) for size in (2_300, 2_301)
    )
    assert chats == pytest.approx(338, rel=0.05)  # the vLLM paper's mean for ShareGPT
    assert questions == pytest.approx((500 - 20) / np.log(500 / 20), rel=0.05)


def test_uniform_lengths_have_the_mean_and_both_ends() -> None:
    sizes = prompts(drawn(Uniform(3, 12, output=1)))
    assert set(sizes) == set(range(3, 13))
    assert sizes.mean() == pytest.approx(7.5, rel=0.02)


def test_log_normal_lengths_have_the_median_inside_their_bounds() -> None:
    sizes = prompts(drawn(LogNormal(500, 0.8, 10, 100_000, output=1)))
    assert np.median(sizes) == pytest.approx(500, rel=0.02)
    assert np.log(sizes).std() == pytest.approx(0.8, rel=0.02)
    assert sizes.min() >= 10


def test_zipf_lengths_are_in_proportion_to_their_weights() -> None:
    sizes = prompts(drawn(Zipf(2.0, 1, 4, output=1)))
    weights = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    assert np.bincount(sizes)[1:] / NUM_DRAWN == pytest.approx(weights / weights.sum(), rel=0.05)


@pytest.mark.parametrize(
    ("low", "high", "mean", "sd"),
    [(1, 60_000, 1_233, 5_000), (1, 200_000, 56_000, 40_000), (1, 2_000_000, 499_000, 400_000)],
)
def test_a_beta_law_has_any_range_mean_and_deviation_asked_for(
    low: int, high: int, mean: float, sd: float
) -> None:
    sizes = prompts(drawn(Beta(low, high, mean, sd, output=1)))
    assert low <= sizes.min() <= sizes.max() <= high
    assert sizes.mean() == pytest.approx(mean, rel=0.03)
    assert sizes.std() == pytest.approx(sd, rel=0.03)


def assert_moments(sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]", mean: float, sd: float) -> None:
    """Mean and standard deviation within four standard errors of these."""
    fourth = ((sizes.astype(float) - mean) ** 4).mean()
    assert abs(sizes.mean() - mean) <= 4 * sd / len(sizes) ** 0.5
    assert abs(sizes.var() - sd**2) <= 4 * ((fourth - sd**4) / len(sizes)) ** 0.5


INFINITE = {  # as Infinite-LLM's paper (arXiv 2401.02669) gives them: longest, mean, standard deviation
    "infinite-0": (60_000, 1_233, 7_785.68),
    "infinite-1": (60_000, 712, 5_531.4),
    "infinite-2": (60_000, 469, 3_506.36),
    "infinite-3": (200_000, 56_362, 28_787.78),
    "infinite-4": (280_000, 75_650, 39_479.42),
    "infinite-5": (600_000, 160_239, 87_906.67),
    "infinite-6": (480_000, 128_804, 70_647.93),
    "infinite-7": (1_200_000, 293_945, 172_169.14),
    "infinite-8": (2_000_000, 498_609, 261_817.24),
}


@pytest.mark.parametrize("name", INFINITE)
def test_infinite_llms_traces_have_their_published_range_mean_and_deviation(name: str) -> None:
    high, mean, sd = INFINITE[name]
    law = LAWS[name]
    assert isinstance(law, Beta | Skewed)
    assert (law.low, law.high) == (1, high)
    sizes = prompts(drawn(law))
    assert 1 <= sizes.min() <= sizes.max() <= high
    assert_moments(sizes, mean, sd)


def test_skewed_lengths_are_chats_and_documents_with_nothing_between() -> None:
    sizes = prompts(drawn(Skewed(1, 60_000, 1_233, 7_785.68, output=1)))
    chats, documents = sizes[sizes <= 2_300], sizes[sizes > 2_300]
    assert len(chats) + len(documents) == NUM_DRAWN
    assert np.median(chats) == pytest.approx(75, rel=0.05)
    assert documents.min() > 55_000


@pytest.mark.parametrize(
    ("law", "complaint"),
    [
        ((1, 60_000, 100, 1_000), "MEAN 100 is not from "),
        ((1, 60_000, 1_233, 8_000), "SD 8000 is not from "),
        ((1, 60_000, 1_233, 2_000), "SD 2000 is not from "),
        ((1, 2_000, 500, 800), "LOW 2300 is above HIGH 2000"),
    ],
)
def test_moments_that_no_chats_and_documents_have_are_refused(
    law: tuple[int, int, float, float], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Skewed(*law)


def test_a_steeper_zipf_has_shorter_prompts() -> None:
    means = [prompts(drawn(LAWS[name], 2_000)).mean() for name in ("zipf1.0", "zipf1.2", "zipf1.4")]
    assert means[0] > means[1] > means[2]
