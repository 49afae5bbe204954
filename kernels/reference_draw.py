"""The definition of sampling tokens, and of penalties, in plain torch."""

import torch
from torch import Tensor

from loong.kernels.sampling.draw_params import DrawParams, Penalties

_ONE = 2.0**44  # the likeliest token's weight; less than 2**19 of it sum to less than 2**63


def draw(logits: Tensor, params: DrawParams, chance: Tensor) -> Tensor:
    """Draw one token a row, by inverting its cumulative distribution in the order of token ids.

    `chance` [N] float64 in [0, 1) says where. Probabilities are integers, in units of 2**-44 of the likeliest
    token's. Integer sums are exact, so they do not depend on the order in which a device adds, or on other
    rows. logits [N, V] float32, the largest of each row finite (other rows get a meaningless token). Returns
    token ids [N] int64; a temperature of 0 takes the likeliest token.
    """
    temperature, top_k, top_p, min_p, *_ = params
    num_tokens = logits.shape[1]
    divisor = temperature.where(temperature > 0, 1.0)
    exact = logits.double()
    ratios = ((exact - exact.amax(1, keepdim=True)) / divisor[:, None]).exp()
    weights = (ratios * _ONE).long().masked_fill(ratios < min_p[:, None], 0)
    rows = ((top_k < num_tokens) | (top_p < 1)).nonzero()[:, 0]  # sorting the others would change nothing
    weights[rows] = _keep_top(logits[rows], weights[rows], top_k[rows], top_p[rows])
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    target = (chance * total).long().minimum(total - 1)
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    drawn = drawn.clamp(max=num_tokens - 1)  # only rows without a finite maximum reach past the end
    return drawn.where(temperature > 0, logits.argmax(1))


def _keep_top(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set weights outside top-k to zero, then those outside top-p of the rest; ties go to the lowest ids."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    ranked = ranked.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None], 0)
    likelier = ranked.cumsum(1) - ranked
    limit = top_p * ranked.sum(1)
    is_cut = (likelier >= limit[:, None]) & (top_p < 1)[:, None]
    return torch.zeros_like(weights).scatter_(1, order, ranked.masked_fill(is_cut, 0))


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Return logits [N, V] after the repetition penalty of all tokens, and the others of the output's."""
    has_appeared = penalties.num_in_output > 0
    factor = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    return (
        torch.where(has_appeared | penalties.is_in_prompt, repeated, logits)
        - penalties.frequency[:, None] * penalties.num_in_output
        - penalties.presence[:, None] * has_appeared
    )
