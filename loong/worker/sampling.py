"""From logits to tokens, with the parameters and the order of processing of vLLM.

Log probabilities are of the logits as they came. Then, row by row: `min_tokens` blocks what would end the
output, biases, penalties, a schema blocks what it does not allow, temperature, min-p, top-k, top-p, and one
draw (`draw.py`), or the likeliest token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from loong.core.events import Logprobs
from loong.core.request import SamplingParams, TokenId
from loong.kernels import Dims
from loong.worker.draw import draw, uniform

TokenIds: TypeAlias = Sequence[TokenId] | Tensor

_ROWS_PER_DRAW = 32  # bounds the float64 and int64 copies of the logits that a draw makes


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """What decides the token of one row, beside its logits.

    `position` is the absolute position of the token to be drawn. The token ids are read only if
    `params.has_penalties`; tensors are int64 [n], best on the logits' device. `allowed` has a bit for each
    token, [V / 32] int32 on the host; None: all are.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int
    prompt_token_ids: TokenIds = ()
    output_token_ids: TokenIds = ()
    allowed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row; `logprobs` is None if none were asked for."""

    token_id: TokenId
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class InvalidLogits:
    """A row that has no token, for its largest logit is not a finite number; its request has failed."""

    largest: float


SamplingResult: TypeAlias = Sampled | InvalidLogits


class Sampler(Protocol):
    """The part of sampling that devices do each in their own way, with the same results."""

    def penalize(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
        """Apply the penalties of each row of logits [N, V], float32, in place."""

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """Each row's token [N] int64 and largest logit [N] of logits [N, V]; not finite: no token."""


class TorchSampler:
    """Does it on the device of the logits, in plain torch."""

    def penalize(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
        """See Sampler."""
        for row, item in enumerate(inputs):
            logits[row] = _penalized(logits[row], item)

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        largest, tokens = logits.max(dim=-1)
        for rows in _drawn_rows(inputs):
            params = [inputs[row].params for row in rows]
            uniforms = [uniform(inputs[row].params.seed, inputs[row].position) for row in rows]
            tokens[rows] = draw(logits[rows], params, uniforms)
        return tokens, largest


_TORCH = TorchSampler()


def sample(
    logits: Tensor, inputs: Sequence[SamplingInput], sampler: Sampler = _TORCH
) -> list[SamplingResult]:
    """Choose the next token of each row of `logits` [N, V], float32, which are not changed.

    A row's result does not depend on the other rows. A temperature of 0 takes the likeliest token,
    the lowest id of equals. Raises ValueError if there is not one input a row.
    """
    Dims().bind("logits", logits, "N V", torch.float32, is_contiguous=False)
    if len(inputs) != logits.shape[0]:
        raise ValueError(f"logits have {logits.shape[0]} rows, but there are {len(inputs)} inputs")
    processed = _processed(logits, inputs, sampler)
    tokens, largest = sampler.choose(processed, inputs)
    if processed is not logits:
        raw = logits.amax(dim=-1)
        largest = torch.where(raw.isfinite(), largest, raw)
    logprobs = _logprobs(logits, tokens, inputs)
    return [
        Sampled(token_id, logprobs.get(row)) if math.isfinite(maximum) else InvalidLogits(maximum)
        for row, (token_id, maximum) in enumerate(zip(tokens.tolist(), largest.tolist(), strict=True))
    ]


def _drawn_rows(inputs: Sequence[SamplingInput]) -> Iterator[list[int]]:
    """The rows that are not greedy, a few at a time."""
    rows = [row for row, item in enumerate(inputs) if item.params.temperature > 0]
    for start in range(0, len(rows), _ROWS_PER_DRAW):
        yield rows[start : start + _ROWS_PER_DRAW]


def _processed(logits: Tensor, inputs: Sequence[SamplingInput], sampler: Sampler) -> Tensor:
    """`logits` after all that comes before temperature: a copy, or themselves if no row has any of it."""
    short = [row for row, item in enumerate(inputs) if item.num_output_tokens < item.params.min_tokens]
    penalized = [row for row, item in enumerate(inputs) if item.params.has_penalties]
    biased = [row for row, item in enumerate(inputs) if item.params.logit_bias]
    constrained = [row for row, item in enumerate(inputs) if item.allowed is not None]
    if not (short or penalized or biased or constrained):
        return logits
    processed = logits.clone()
    vocabulary = range(logits.shape[1])
    for row in short:
        stops = [token_id for token_id in inputs[row].params.stop_token_ids if token_id in vocabulary]
        processed[row, stops] = -torch.inf
    for row in biased:
        bias = {i: value for i, value in inputs[row].params.logit_bias if i in vocabulary}
        processed[row, [*bias]] += torch.tensor([*bias.values()], device=logits.device)
    if penalized:
        part = processed[penalized]
        sampler.penalize(part, [inputs[row] for row in penalized])
        processed[penalized] = part
    if constrained:
        is_blocked = _is_blocked([inputs[row].allowed for row in constrained], logits)
        processed[constrained] = processed[constrained].masked_fill(is_blocked, -torch.inf)
    return processed


def _is_blocked(allowed: Sequence[Tensor | None], logits: Tensor) -> Tensor:
    """Which tokens rows may not take, bool [N, V] on the device of `logits`; bits travel, not bools."""
    words = torch.stack([bits for bits in allowed if bits is not None]).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, : logits.shape[1]] == 0


def _penalized(logits: Tensor, item: SamplingInput) -> Tensor:
    """One row [V] after the repetition penalty of all tokens, and the others of the output's."""
    prompt, output = (
        torch.as_tensor(ids, dtype=torch.int64, device=logits.device)
        for ids in (item.prompt_token_ids, item.output_token_ids)
    )
    counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
    has_appeared = counts > 0
    is_repeated = has_appeared.index_fill(0, prompt, value=True)
    params = item.params
    factor = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    return (
        torch.where(is_repeated, repeated, logits)
        - params.frequency_penalty * counts
        - params.presence_penalty * has_appeared
    )


def _logprobs(logits: Tensor, tokens: Tensor, inputs: Sequence[SamplingInput]) -> dict[int, Logprobs]:
    """Log probabilities of the rows that ask for them, under the softmax of `logits`."""
    counts = {
        row: item.params.num_logprobs
        for row, item in enumerate(inputs)
        if item.params.num_logprobs is not None
    }
    if not counts:
        return {}
    rows = list(counts)
    wanted = logits[rows]
    # float64, so that what is reported does not show the order in which the device added.
    logprobs = wanted.double() - wanted.double().logsumexp(dim=-1, keepdim=True)
    chosen = logprobs.gather(1, tokens[rows].unsqueeze(1)).squeeze(1).tolist()
    top_ids = _top_ids(wanted, max(counts.values()))
    top = logprobs.gather(1, top_ids).tolist()
    return {
        row: Logprobs(chosen[i], tuple(zip(ids[:count], top[i][:count], strict=True)))
        for i, ((row, count), ids) in enumerate(zip(counts.items(), top_ids.tolist(), strict=True))
    }


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` likeliest tokens of each row, likeliest first; of equals, the lowest ids."""
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
