"""The result of attending to part of the KV: the one value that everything here is made of."""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention of T query tokens over some set of KV, normalised over that set.

    Partials over disjoint sets form a commutative monoid under `merge`, so KV may be cut anywhere.
    """

    out: Tensor  # [T, H, D] float32
    lse: Tensor  # [T, H] float32, natural log of the sum of exponentials; -inf: the row has seen no KV

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return room for a partial, of any contents."""
        return cls(
            torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device),
        )

    @classmethod
    def identity(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return attention over no KV at all: `(0, -inf)`, which merging leaves everything else as it is."""
        return cls(
            torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=device),
        )
