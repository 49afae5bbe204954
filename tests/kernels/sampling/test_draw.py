import pytest
import torch
from kernel_cases import poisoned, random_values
from torch import Tensor

from loong.core.request import SamplingParams
from loong.kernels import reference_draw
from loong.kernels.sampling.draw import MAX_VOCABULARY, DrawWorkspace, draw
from loong.kernels.sampling.draw_params import DrawParams, Penalties
from loong.kernels.sampling.penalties import penalize
from loong.model.shapes import SHAPES
from loong.worker.sampling.random_sampling import chances

ROWS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (1.0, None, 1.0, 0.0),
            (0.0, None, 1.0, 0.0),
            (0.7, 1, 1.0, 0.0),
            (1.3, 7, 1.0, 0.0),
            (1.0, None, 0.9, 0.0),
            (2.0, None, 0.3, 0.0),
            (1.0, 20, 0.8, 0.05),
            (0.5, None, 1.0, 0.2),
            (100.0, 1000, 0.999, 0.0),
            (1.0, 3, 1e-9, 1.0),
            (100.0, 5000, 1.0, 0.0),
            (100.0, None, 0.999, 0.0),
        ]
    )
]


def params_of(rows: list[SamplingParams], num_tokens: int, device: torch.device) -> DrawParams:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DrawParams(
        temperature=column([row.temperature for row in rows], torch.float64),
        top_k=column([row.top_k or num_tokens for row in rows], torch.int64),
        top_p=column([row.top_p for row in rows], torch.float64),
        min_p=column([row.min_p for row in rows], torch.float64),
        seed=column([row.seed for row in rows], torch.int64),
        position=column([100 + 2**33 * i for i in range(len(rows))], torch.int64),
    )


def drawn(logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    tokens = torch.full(logits.shape[:1], -1, device=logits.device)
    largest = poisoned(*logits.shape[:1], dtype=torch.float32, device=logits.device)
    workspace = DrawWorkspace.empty(len(logits) + 1, logits.shape[1], logits.device)
    draw(logits, params, workspace=workspace, tokens=tokens, largest=largest)
    return tokens, largest


def test_penalties_equal_the_definition(device: torch.device) -> None:
    logits = random_values(1, 3, 3000, dtype=torch.float32, device=device)
    is_in_prompt = torch.zeros(3, 3000, dtype=torch.bool, device=device)
    is_in_prompt[:, [5, 7, 2999]] = True
    num_in_output = torch.zeros(3, 3000, dtype=torch.int32, device=device)
    num_in_output[:, 7], num_in_output[:, 9] = 1, 3
    penalties = Penalties(
        torch.tensor([1.3, 1.0, 0.8], device=device),
        torch.tensor([0.0, 0.5, -1.0], device=device),
        torch.tensor([0.0, -0.7, 0.3], device=device),
        is_in_prompt,
        num_in_output,
    )
    out = poisoned(3, 3000, dtype=torch.float32, device=device)
    penalize(logits, penalties, out=out)
    torch.testing.assert_close(out, reference_draw.penalize(logits, penalties))


@pytest.mark.parametrize(("num_tokens", "num_levels"), [(1, None), (50, None), (5500, 2)])
def test_tokens_equal_the_definition(num_tokens: int, num_levels: int | None, device: torch.device) -> None:
    logits = 3 * random_values(num_tokens, len(ROWS), num_tokens, dtype=torch.float32, device=device)
    if num_levels is not None:  # many equal logits, and zeros of both signs
        logits = (logits * num_levels).round() / num_levels
    params = params_of(ROWS, num_tokens, device)
    tokens, largest = drawn(logits, params)
    assert torch.equal(tokens, reference_draw.draw(logits, params, chances(params).to(device)))
    assert torch.equal(largest, logits.amax(1))


def test_rows_of_invalid_logits_are_reported_by_their_largest(device: torch.device) -> None:
    logits = random_values(1, 4, 30, dtype=torch.float32, device=device)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    _, largest = drawn(logits, params_of(ROWS[:4], 30, device))
    assert largest.isfinite().tolist() == [False, False, False, True]


def test_banned_tokens_are_never_drawn(device: torch.device) -> None:
    rows = ROWS[::3]
    logits = torch.full((len(rows), 40), -torch.inf, device=device)
    logits[:, 17] = -3.0
    tokens, _ = drawn(logits, params_of(rows, 40, device))
    assert tokens.tolist() == [17] * len(rows)


def test_a_vocabulary_that_could_overflow_is_refused() -> None:
    params = params_of(ROWS[:1], 5, torch.device("cpu"))
    with pytest.raises(ValueError, match="at most 524287 tokens, got 524288"):
        drawn(torch.zeros(1, MAX_VOCABULARY + 1), params)
    assert all(config.vocab_size <= MAX_VOCABULARY for config in SHAPES.values())


@pytest.mark.gpu
def test_all_tokens_of_the_largest_vocabulary_are_drawn_if_they_are_equal() -> None:
    rows, device = [SamplingParams(temperature=1.0, seed=seed) for seed in range(64)], torch.device("cuda")
    params, logits = params_of(rows, MAX_VOCABULARY, device), torch.zeros(64, MAX_VOCABULARY, device=device)
    tokens, _ = drawn(logits, params)
    assert torch.equal(tokens, reference_draw.draw(logits, params, chances(params).to(device)))
    assert tokens.max() > MAX_VOCABULARY // 2
