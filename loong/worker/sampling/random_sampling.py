"""Random draws of tokens, which depend on a row's logits, parameters, seed and position alone.

Probabilities are integers, in units of 2**-44 of the likeliest token's. Integer sums are exact. So they do
not depend on the order in which a device adds, or on the other rows of a batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loong.core.request import SamplingParams
from loong.kernels.sampling.draw_params import DrawParams

_ONE = 2**44  # the likeliest token's weight; 2**18 tokens of it still sum to less than 2**63


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token of `position`: Philox of (seed, position)."""
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw one token a row by inverting its cumulative distribution, in the order of token ids.

    `logits` is [N, V], float32, with a finite maximum in each row (other rows get a meaningless token);
    no temperature is 0. Returns token ids [N], int64.
    """
    weights = _weights(logits, params)
    restricted = [row for row, p in enumerate(params) if p.top_k is not None or p.top_p < 1]
    if restricted:
        kept = _keep_top(logits[restricted], weights[restricted], [params[row] for row in restricted])
        weights[restricted] = kept
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = (_column(uniforms, logits) * total).long().minimum(total - 1)
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[1] - 1)  # only rows without a finite maximum reach past the end


def draw_params(params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int) -> DrawParams:
    """Return the parameters of draws at these positions, a row each, as kernels read them; on the host."""
    top_k = [vocab_size if p.top_k is None else min(p.top_k, vocab_size) for p in params]
    return DrawParams(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64),
        top_k=torch.tensor(top_k, dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
        seed=torch.tensor([p.seed for p in params], dtype=torch.int64),
        position=torch.tensor(positions, dtype=torch.int64),
    )


def _weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scale to integer weights [N, V] after temperature and min-p; the likeliest token's is `_ONE`."""
    temperature = _column([p.temperature for p in params], logits)
    min_p = _column([p.min_p for p in params], logits)
    exact = logits.double()
    ratios = ((exact - exact.amax(dim=-1, keepdim=True)) / temperature).exp()
    return (ratios * _ONE).long().masked_fill(ratios < min_p, 0)


def _keep_top(logits: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set weights outside top-k to zero, then those outside top-p of the rest; ties go to the lowest ids."""
    num_tokens = logits.shape[1]
    top_k = _column([num_tokens if p.top_k is None else min(p.top_k, num_tokens) for p in params], logits)
    top_p = _column([p.top_p for p in params], logits)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    ranked = ranked.masked_fill(torch.arange(num_tokens, device=logits.device) >= top_k, 0)
    cumulative = ranked.cumsum(dim=-1)
    likelier = cumulative - ranked
    ranked = ranked.masked_fill(likelier >= top_p * cumulative[:, -1:], 0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one float64 value a row, as [N, 1] on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
