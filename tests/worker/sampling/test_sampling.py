import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loong.core.instructions import RequestInput, Sibling
from loong.core.placement import Placement
from loong.core.request import SamplingParams
from loong.kernels import reference_draw
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.logits_processors import LogitsProcessors
from loong.worker.sampling.random_sampling import draw_params, uniform
from loong.worker.sampling.sampler import InvalidLogits, Sampled, SamplingResult, TorchSampler, sample
from loong.worker.sampling.sampling_input import DrawnToken, SamplingInput, sampling_inputs

GREEDY = SamplingParams(temperature=0)

seeds = st.integers(0, 2**31)
laws = examples(15, thorough=240)


def draw_logits(seed: int, num_rows: int, vocab_size: int, num_levels: int | None = None) -> Tensor:
    """Return normal logits; `num_levels` rounds them so that there are ties."""
    logits = 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return logits if num_levels is None else (logits * num_levels).round() / num_levels


def draw(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """Return the tokens of rows whose chances are given."""
    rows = draw_params(params, [0] * len(params), logits.shape[1])
    return reference_draw.draw(logits, rows, torch.tensor(uniforms, dtype=torch.float64))


def at(position: int, params: SamplingParams, output: tuple[int, ...] = ()) -> SamplingInput:
    return SamplingInput(params, position, len(output), (), output)


def sample_rows(logits: Tensor, inputs: list[SamplingInput]) -> list[SamplingResult]:
    choice = sample(logits, inputs, TorchSampler())
    return choice.results(choice.tensors)


def token_ids(logits: Tensor, inputs: list[SamplingInput]) -> list[int]:
    results = sample_rows(logits, inputs)
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token_id for result in results if isinstance(result, Sampled)]


def chi_square(observed: list[int], probabilities: Tensor) -> float:
    counts = torch.bincount(torch.tensor(observed), minlength=len(probabilities)).double()
    expected = probabilities * len(observed)
    return float(((counts - expected) ** 2 / expected).sum())


@st.composite
def params_of_any_kind(draw_from: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=8,
        min_tokens=draw_from(st.integers(0, 4)),
        temperature=draw_from(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_p=draw_from(st.sampled_from([0.1, 0.6, 0.95, 1.0])),
        top_k=draw_from(st.sampled_from([None, 1, 3, 1000])),
        min_p=draw_from(st.sampled_from([0.0, 0.05, 0.5])),
        presence_penalty=draw_from(st.sampled_from([0.0, -1.0, 0.5])),
        frequency_penalty=draw_from(st.sampled_from([0.0, 0.7])),
        repetition_penalty=draw_from(st.sampled_from([1.0, 1.3, 0.8])),
        seed=draw_from(seeds),
        stop_token_ids=tuple(draw_from(st.lists(st.integers(0, 30), max_size=2))),
        num_logprobs=draw_from(st.sampled_from([None, 0, 1, 5])),
    )


@st.composite
def inputs_of_any_kind(draw_from: st.DrawFn) -> SamplingInput:
    output = tuple(draw_from(st.lists(st.integers(0, 20), max_size=6)))
    prompt = tuple(draw_from(st.lists(st.integers(0, 20), min_size=1, max_size=6)))
    return SamplingInput(
        draw_from(params_of_any_kind()), draw_from(st.integers(0, 10**6)), len(output), prompt, output
    )


# The 99.9th percentile of chi-square with 7 degrees of freedom is 24.3.
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_follow_the_softmax_over_seeds_and_over_positions(temperature: float, varied: str) -> None:
    logits = draw_logits(1, 1, 8)
    inputs = [
        at(
            n if varied == "position" else 5,
            SamplingParams(temperature=temperature, seed=n * (varied == "seed")),
        )
        for n in range(4000)
    ]
    expected = (logits[0].double() / temperature).softmax(-1)
    assert chi_square(token_ids(logits.expand(4000, -1), inputs), expected) < 24.3


def test_draws_at_successive_positions_are_independent() -> None:
    logits = torch.zeros(4001, 4)
    tokens = token_ids(logits, [at(n, SamplingParams(seed=3)) for n in range(4001)])
    pairs = [4 * first + second for first, second in pairwise(tokens)]
    # The 99.9th percentile of chi-square with 15 degrees of freedom is 37.7.
    assert chi_square(pairs, torch.full((16,), 1 / 16, dtype=torch.float64)) < 37.7


def test_a_token_less_likely_than_a_billionth_still_has_its_share() -> None:
    logits = torch.tensor([[0.0, -30.0]])
    share = math.exp(-30)
    (drawn,) = draw(logits, [SamplingParams()], [1 - share / 2]).tolist()
    (not_drawn,) = draw(logits, [SamplingParams()], [1 - 2 * share]).tolist()
    assert (drawn, not_drawn) == (1, 0)


@given(seeds, st.integers(0, 2**40))
def test_the_uniform_number_is_at_least_zero_and_less_than_one(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def support(logits: Tensor, params: SamplingParams) -> set[int]:
    """Return every token that some draw gives: the cumulative distribution is probed densely."""
    probes = [i / 4000 for i in range(4000)]
    return set(draw(logits.expand(4000, -1), [params] * 4000, probes).tolist())


def brute_force_support(logits: list[float], params: SamplingParams) -> set[int]:
    """min-p, top-k and top-p, each by its definition, on Python floats."""
    weights = {i: math.exp(x / params.temperature) for i, x in enumerate(logits)}
    likeliest = max(weights.values())
    weights = {i: w for i, w in weights.items() if w >= params.min_p * likeliest}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))[: params.top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = set(), 0.0
    for token_id in ranked:
        kept.add(token_id)
        mass += weights[token_id]
        if mass >= params.top_p * total:
            break
    return kept


@laws
@given(
    seeds,
    st.sampled_from([None, 1, 2, 5, 100]),
    st.sampled_from([0.05, 0.33, 0.71, 1.0]),
    st.sampled_from([0.0, 0.11, 0.43, 1.0]),
)
def test_the_support_is_that_of_the_definition(
    seed: int, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = draw_logits(seed, 1, 9, num_levels=2).clamp(-2, 2)  # ties, and nothing too rare to be probed
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    assert support(logits, params) == brute_force_support(logits[0].tolist(), params)


@laws
@given(st.lists(inputs_of_any_kind(), min_size=1, max_size=6), seeds)
def test_a_row_does_not_depend_on_the_other_rows(inputs: list[SamplingInput], seed: int) -> None:
    logits = draw_logits(seed, len(inputs), 21, num_levels=4)
    together = sample_rows(logits, inputs)
    alone = [sample_rows(logits[i : i + 1], [item])[0] for i, item in enumerate(inputs)]
    assert together == alone
    assert sample_rows(logits.flip(0), inputs[::-1])[::-1] == alone


def test_a_row_does_not_depend_on_how_many_rows_are_drawn_at_once() -> None:
    logits = draw_logits(2, 1, 1000)
    inputs = [at(n, SamplingParams(seed=n % 7, top_p=0.9)) for n in range(100)]
    together = token_ids(logits.expand(100, -1), inputs)
    assert together == [token_ids(logits, [item])[0] for item in inputs]
    assert len(set(together)) > 10


@laws
@given(seeds, seeds, st.integers(0, 10**6))
def test_the_same_seed_and_position_give_the_same_token(seed: int, key: int, position: int) -> None:
    logits = draw_logits(seed, 1, 50)
    item = at(position, SamplingParams(seed=key))
    assert sample_rows(logits, [item]) == sample_rows(logits.clone(), [item])


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    logits = torch.zeros(1, 10**5)
    pairs = [(seed, position) for seed in range(5) for position in range(5)]
    tokens = [token_ids(logits, [at(p, SamplingParams(seed=s))])[0] for s, p in pairs]
    assert len(set(tokens)) == len(pairs)


@laws
@given(seeds, st.booleans())
def test_temperature_zero_takes_the_likeliest_token_and_the_lowest_id_of_equals(
    seed: int, has_other_rows: bool
) -> None:
    logits = draw_logits(seed, 3, 12, num_levels=1)
    params = [GREEDY, SamplingParams() if has_other_rows else GREEDY, GREEDY]
    tokens = token_ids(logits, [at(0, p) for p in params])
    for row in (0, 2):
        assert tokens[row] == logits[row].tolist().index(max(logits[row].tolist()))


@laws
@given(seeds, st.integers(0, 100))
def test_top_k_of_one_and_a_tiny_temperature_are_both_greedy(seed: int, position: int) -> None:
    ties = draw_logits(seed, 1, 12, num_levels=1)
    assert token_ids(ties, [at(position, SamplingParams(top_k=1))]) == token_ids(ties, [at(0, GREEDY)])
    assert token_ids(ties, [at(position, SamplingParams(top_p=1e-9))]) == token_ids(ties, [at(0, GREEDY)])
    logits = draw_logits(seed, 1, 12)
    cold = SamplingParams(temperature=1e-300)
    assert token_ids(logits, [at(position, cold)]) == token_ids(logits, [at(0, GREEDY)])


def penalized(logits: list[float], item: SamplingInput) -> list[float]:
    """Return the penalties by their definition, token by token."""
    params, counts = item.params, Counter(int(i) for i in item.output_token_ids)
    seen = {int(i) for i in item.prompt_token_ids} | set(counts)
    for i in seen:
        logits[i] *= 1 / params.repetition_penalty if logits[i] > 0 else params.repetition_penalty
    for i, count in counts.items():
        logits[i] -= params.frequency_penalty * count + params.presence_penalty
    return logits


@laws
@given(
    seeds,
    st.lists(st.integers(0, 9), max_size=8),
    st.lists(st.integers(0, 9), max_size=8),
    st.sampled_from([0.0, 1.0, -0.5]),
    st.sampled_from([0.0, 0.7, -1.1]),
    st.sampled_from([1.0, 1.9, 0.6]),
)
def test_penalties_equal_their_definition(
    seed: int,
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    def item(position: int) -> SamplingInput:
        params = SamplingParams(
            temperature=position % 2,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
        )
        return SamplingInput(params, position, len(output), prompt, output)

    logits = draw_logits(seed, 1, 10)
    expected = torch.tensor([penalized(logits[0].tolist(), item(0))])
    plain = [at(n, SamplingParams(temperature=n % 2)) for n in range(40)]
    assert token_ids(logits.expand(40, -1), [item(n) for n in range(40)]) == token_ids(
        expected.expand(40, -1), plain
    )


def test_stop_tokens_cannot_be_chosen_before_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    for temperature, allowed in ((0.0, {3}), (1.0, {0, 3})):
        params = SamplingParams(min_tokens=2, temperature=temperature, stop_token_ids=(1, 2, 99))
        for output in ((), (3,)):
            tokens = token_ids(logits.expand(200, -1), [at(n, params, output) for n in range(200)])
            assert set(tokens) == allowed
        assert token_ids(logits, [at(0, params, (3, 3))])[0] in (1, 2)


_few = st.integers(0, 3)


def is_possible(token_id: int, output: tuple[int, ...], params: SamplingParams) -> bool:
    """Return whether a token may follow an output."""
    longer = (*output, token_id)
    is_bad = any(longer[-len(word) :] == word for word in params.bad_words if len(word) <= len(longer))
    return not is_bad and (params.allowed_token_ids is None or token_id in params.allowed_token_ids)


@laws
@given(
    st.lists(st.lists(_few, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    st.none() | st.lists(_few, min_size=1).map(tuple),
    st.lists(st.lists(_few, max_size=5).map(tuple), min_size=1, max_size=4),
    seeds,
)
def test_neither_bad_words_nor_other_tokens_than_the_allowed_ones_come(
    bad_words: tuple[tuple[int, ...], ...],
    allowed: tuple[int, ...] | None,
    outputs: list[tuple[int, ...]],
    seed: int,
) -> None:
    constraints = Constraints(None, 4)
    params = SamplingParams(
        temperature=1.5, bad_words=bad_words, allowed_token_ids=allowed, logit_bias=((2, 3.0),), seed=seed
    )
    bare = SamplingParams(temperature=1.5, logit_bias=((2, 3.0),), seed=seed)
    logits = draw_logits(seed, len(outputs), 4)
    drawn = [DrawnToken(Sibling("a", params), known(output, params)) for output in outputs]
    inputs = sampling_inputs(drawn, constraints)
    for row, result in enumerate(sample_rows(logits, inputs)):
        possible = [i for i in range(4) if is_possible(i, outputs[row], params)]
        if not possible:
            assert result == InvalidLogits(-math.inf)
            continue
        left = torch.full((1, 4), -torch.inf)
        left[0, possible] = logits[row, possible]
        assert result == sample_rows(left, [at(inputs[row].position, bare, outputs[row])])[0]


@laws
@given(
    st.lists(st.lists(_few, min_size=2, max_size=4).map(tuple), min_size=1, max_size=6).map(tuple),
    st.lists(st.lists(_few, max_size=5).map(tuple), min_size=1, max_size=3),
    st.integers(0, 4),
    seeds,
)
def test_bad_words_go_on_from_step_to_step(
    bad_words: tuple[tuple[int, ...], ...], outputs: list[tuple[int, ...]], num_plain: int, seed: int
) -> None:
    params = SamplingParams(bad_words=bad_words)
    rows = [*outputs, *[(0,)] * num_plain]
    inputs = [at(0, params if row < len(outputs) else GREEDY, output) for row, output in enumerate(rows)]
    processors = LogitsProcessors(inputs, 4, TorchSampler())
    new = torch.randint(4, (6, len(rows)), generator=torch.Generator().manual_seed(seed))
    for tokens in new:
        logits = torch.zeros(len(rows), 4)
        processors.apply(logits)
        for row, output in enumerate(rows):
            possible = [row >= len(outputs) or is_possible(i, output, params) for i in range(4)]
            assert logits[row].isfinite().tolist() == possible
        processors.advance(tokens)
        rows = [(*output, int(token_id)) for output, token_id in zip(rows, tokens, strict=True)]


def known(output: tuple[int, ...], params: SamplingParams) -> RequestInput:
    """Return the input of a request with this output."""
    return RequestInput("a", (), 1, len(output), Placement(), params, (), output)


@laws
@given(seeds, st.sampled_from([0, 1, 3, 20]), inputs_of_any_kind())
def test_logprobs_are_those_of_the_logits_as_they_came(
    seed: int, num_logprobs: int, item: SamplingInput
) -> None:
    logits = draw_logits(seed, 1, 21)
    asked = SamplingInput(
        SamplingParams(temperature=0.7, repetition_penalty=1.5, num_logprobs=num_logprobs, top_k=4),
        item.position,
        item.num_output_tokens,
        item.prompt_token_ids,
        item.output_token_ids,
    )
    (result,) = sample_rows(logits, [asked])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    expected = logits[0].log_softmax(-1)
    top = expected.topk(num_logprobs)
    assert result.logprobs.chosen == pytest.approx(float(expected[result.token_id]), abs=1e-5)
    assert [i for i, _ in result.logprobs.top] == top.indices.tolist()
    assert [x for _, x in result.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    params = [SamplingParams(num_logprobs=n) for n in (None, 2, 0)]
    results = sample_rows(torch.zeros(3, 5), [at(0, p) for p in params])
    logprobs = [result.logprobs for result in results if isinstance(result, Sampled)]
    found = [x for x in logprobs if x is not None]
    assert [x is None for x in logprobs] == [True, False, False]
    assert [[token_id for token_id, _ in x.top] for x in found] == [[0, 1], []]
    assert [x.chosen for x in found] == pytest.approx([-math.log(5)] * 2)


@laws
@given(
    st.lists(inputs_of_any_kind(), min_size=3, max_size=3),
    seeds,
    st.sampled_from([math.nan, math.inf]),
    st.integers(0, 20),
)
def test_invalid_logits_fail_their_own_row_and_no_other(
    inputs: list[SamplingInput], seed: int, bad: float, token_id: int
) -> None:
    logits = draw_logits(seed, 3, 21)
    intact = sample_rows(logits, inputs)
    logits[1, token_id] = bad
    first, failed, last = sample_rows(logits, inputs)
    assert [first, last] == [intact[0], intact[2]]
    assert isinstance(failed, InvalidLogits)
    assert str(failed.largest) == str(bad)


def test_a_row_without_any_possible_token_is_invalid() -> None:
    nothing = torch.full((1, 4), -torch.inf)
    blocked = SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2, 3))
    assert sample_rows(nothing, [at(0, SamplingParams())]) == [InvalidLogits(-math.inf)]
    assert sample_rows(torch.zeros(1, 4), [at(0, blocked)]) == [InvalidLogits(-math.inf)]


@laws
@given(st.lists(inputs_of_any_kind(), max_size=4), seeds)
def test_logits_are_not_changed(inputs: list[SamplingInput], seed: int) -> None:
    logits = draw_logits(seed, len(inputs), 21)
    before = logits.clone()
    sample_rows(logits, inputs)
    assert torch.equal(logits, before)


def test_greedy_rows_are_neither_sorted_nor_drawn_nor_copied() -> None:
    with torch.profiler.profile() as profile:
        sample_rows(torch.zeros(4, 9), [at(n, GREEDY) for n in range(4)])
    operators = {event.key for event in profile.key_averages()}
    assert "aten::max" in operators
    assert not operators & {"aten::sort", "aten::cumsum", "aten::clone", "aten::exp"}


def test_there_must_be_one_input_a_row_and_float32_logits() -> None:
    with pytest.raises(ValueError, match="logits have 2 rows, but there are 1 inputs"):
        sample_rows(torch.zeros(2, 3), [at(0, GREEDY)])
    with pytest.raises(ValueError, match=r"logits must be torch\.float32"):
        sample_rows(torch.zeros(1, 3, dtype=torch.float16), [at(0, GREEDY)])
