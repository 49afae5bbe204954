"""From logits to tokens, with the parameters and the order of processing of vLLM.

Log probabilities are of the unchanged logits. Then, row by row: logits processors (`logits_processors.py`),
temperature, min-p, top-k, top-p, and one draw (`reference_draw.draw`), or the likeliest token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from loong.core.events import Logprobs
from loong.core.request import TokenId
from loong.kernels import Dims, reference_draw
from loong.kernels.sampling.draw_params import Penalties
from loong.worker.sampling.logits_processors import LogitsOps, LogitsProcessors
from loong.worker.sampling.random_sampling import chances, draw_params
from loong.worker.sampling.sampling_input import SamplingInput

_ROWS_PER_DRAW = 32  # bounds the float64 and int64 copies of the logits that a draw makes


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row; `logprobs` is None if none were asked for."""

    token_id: TokenId
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class InvalidLogits:
    """A row without a token, since its largest logit is not a finite number; its request has failed."""

    largest: float


SamplingResult: TypeAlias = Sampled | InvalidLogits


class Sampler(LogitsOps, Protocol):
    """The part of sampling that each kind of device implements, with the same results."""

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """Return each row's token [N] int64 and largest logit [N] of logits [N, V]; not finite: no token."""


class TorchSampler:
    """Samples on the host, in plain torch."""

    def upload(self, tensor: Tensor) -> Tensor:
        """See LogitsOps."""
        return tensor

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """See LogitsOps."""
        logits.copy_(reference_draw.penalize(logits, penalties))

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        largest, tokens = logits.max(dim=-1)
        for rows in _drawn_rows(inputs):
            drawn = [inputs[row] for row in rows]
            params = draw_params([i.params for i in drawn], [i.position for i in drawn], logits.shape[1])
            tokens[rows] = reference_draw.draw(logits[rows], params, chances(params))
        return tokens, largest


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of rows of logits, on their device, which may have yet to choose them."""

    tokens: Tensor  # [N] int64
    largest: Tensor  # [N], of logits; not finite: no token
    logprobs: tuple[Tensor, ...]  # see `find_logprobs`, of the rows that ask for them; or empty
    num_logprobs: Mapping[int, int]  # by row, how many it asked for

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the host must read for the results."""
        return self.tokens, self.largest, *self.logprobs

    def results(self, read: Sequence[Tensor]) -> list[SamplingResult]:
        """Return the results of all rows; `read` is `tensors` on the host."""
        tokens, largest, *found = read
        logprobs: dict[int, Logprobs] = {}
        if found:
            each = read_logprobs(found, list(self.num_logprobs.values()))
            logprobs = dict(zip(self.num_logprobs, each, strict=True))
        return [
            Sampled(token_id, logprobs.get(row)) if math.isfinite(maximum) else InvalidLogits(maximum)
            for row, (token_id, maximum) in enumerate(zip(tokens.tolist(), largest.tolist(), strict=True))
        ]


def sample(logits: Tensor, inputs: Sequence[SamplingInput], sampler: Sampler) -> SampledTokens:
    """Sample the next token of each row of `logits` [N, V], float32, which are not changed.

    A row's result does not depend on the other rows. A temperature of 0 takes the likeliest token, the lowest
    id of equals. Raises ValueError if there is not one input a row. It does not wait for a device.
    """
    Dims().bind("logits", logits, "N V", torch.float32, is_contiguous=False)
    if len(inputs) != logits.shape[0]:
        raise ValueError(f"logits have {logits.shape[0]} rows, but there are {len(inputs)} inputs")
    adjusted = _adjusted(logits, inputs, sampler)
    tokens, largest = sampler.choose(adjusted, inputs)
    if adjusted is not logits:
        raw = logits.amax(dim=-1)
        largest = torch.where(raw.isfinite(), largest, raw)
    counts = {
        row: item.params.num_logprobs
        for row, item in enumerate(inputs)
        if item.params.num_logprobs is not None
    }
    found: tuple[Tensor, ...] = ()
    if counts:
        rows = sampler.upload(torch.tensor([*counts], dtype=torch.int64))
        found = find_logprobs(logits[rows], tokens[rows], max(counts.values()))
    return SampledTokens(tokens, largest, found, counts)


def _drawn_rows(inputs: Sequence[SamplingInput]) -> Iterator[list[int]]:
    """Yield the rows that are not greedy, a few at a time."""
    rows = [row for row, item in enumerate(inputs) if item.params.temperature > 0]
    for start in range(0, len(rows), _ROWS_PER_DRAW):
        yield rows[start : start + _ROWS_PER_DRAW]


def _adjusted(logits: Tensor, inputs: Sequence[SamplingInput], sampler: Sampler) -> Tensor:
    """Return `logits` after all steps before temperature: a copy, or themselves if no row needs any."""
    adjusted_rows = [row for row, item in enumerate(inputs) if item.has_logits_processors]
    if not adjusted_rows:
        return logits
    rows = sampler.upload(torch.tensor(adjusted_rows, dtype=torch.int64))  # a list would wait
    part = logits[rows]
    LogitsProcessors([inputs[row] for row in adjusted_rows], logits.shape[1], sampler).apply(part)
    adjusted = logits.clone()
    adjusted[rows] = part
    return adjusted


def find_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of `tokens` [N], and of the `count` likeliest tokens, with their ids.

    They are [N] and [N, count] float64, so that results do not depend on the order in which the device adds,
    and [N, count] int64. Of equal ones, the lowest ids come first.
    """
    exact = logits.double()
    total = exact.logsumexp(dim=-1)
    chosen = exact.gather(1, tokens.unsqueeze(1)).squeeze(1) - total
    top_ids = _top_ids(logits, count)
    return chosen, exact.gather(1, top_ids) - total.unsqueeze(1), top_ids


def find_prompt_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find log probabilities of `tokens` [N] and of the `count` likeliest, as `find_logprobs` does.

    Returns the log probabilities of `tokens` [N] and their ranks [N], from 1. Then follow the ids of the
    likeliest [N, count] and their log probabilities [N, count].
    """
    chosen, top, top_ids = find_logprobs(logits, tokens, count)
    keys = _order(logits)
    ranks = (keys >= keys.gather(1, tokens.unsqueeze(1))).sum(dim=1)
    return chosen, ranks, top_ids, top


def read_logprobs(found: Sequence[Tensor], counts: Sequence[int]) -> list[Logprobs]:
    """Return the results of `find_logprobs` by row, with the number of tokens that each asked for."""
    rows = zip(*(values.tolist() for values in found), counts, strict=True)
    return [
        Logprobs(chosen, tuple(zip(ids[:count], top[:count], strict=True)))
        for chosen, top, ids, count in rows
    ]


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest tokens of each row [N, count]; of equals, the lowest ids first."""
    return _order(logits).topk(min(count, logits.shape[1]), dim=1).indices


def _order(logits: Tensor) -> Tensor:
    """Return whole numbers [N, V] that rise with the logits; of equal logits the lowest ids have the highest.

    All numbers of a row are different, so that no sort must be stable.
    """
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0, which it equals
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    return order - torch.arange(logits.shape[1], device=logits.device)
