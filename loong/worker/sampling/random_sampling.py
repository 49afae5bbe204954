"""The chances and the parameters of random draws (`reference_draw.draw`), on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loong.core.request import SamplingParams
from loong.kernels.sampling.draw_params import DrawParams


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token of `position`: Philox of (seed, position)."""
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def chances(params: DrawParams) -> Tensor:
    """Return the `uniform` number [N] float64 of each row."""
    rows = zip(params.seed.tolist(), params.position.tolist(), strict=True)
    return torch.tensor([uniform(seed, position) for seed, position in rows], dtype=torch.float64)


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
