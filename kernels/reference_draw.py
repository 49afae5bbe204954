"""The definition of sampling tokens, and of penalties, in plain torch."""

import torch
from torch import Tensor

from loong.kernels.sampling.draw_params import DrawParams, Penalties

_ONE = 2.0**44  # the likeliest token's weight


def draw(logits: Tensor, params: DrawParams, chance: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, in the order of token ids, at `chance` [N] in [0, 1).

    logits [N, V] float32, the largest of each row finite. Returns token ids [N] int64.
    """
    temperature, top_k, top_p, min_p, *_ = params
    divisor = temperature.where(temperature > 0, 1.0)
    exact = logits.double()
    ratios = ((exact - exact.amax(1, keepdim=True)) / divisor[:, None]).exp()
    weights = (ratios * _ONE).long().masked_fill(ratios < min_p[:, None], 0)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    ranked = ranked.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None], 0)
    likelier = ranked.cumsum(1) - ranked
    limit = top_p * ranked.sum(1)
    is_cut = (likelier >= limit[:, None]) & (top_p < 1)[:, None]
    weights = torch.zeros_like(weights).scatter_(1, order, ranked.masked_fill(is_cut, 0))
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    target = (chance * total).long().minimum(total - 1)
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return drawn.where(temperature > 0, logits.argmax(1))


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
