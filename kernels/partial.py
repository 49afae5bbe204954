"""The result of attending to part of the KV: the one value that everything here is made of."""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention of T query tokens over some set of KV, normalised over that set.

    Partials over disjoint sets form a commutative monoid under `merge`, so KV may be cut anywhere.
    """

    out: Tensor  # [T, H, D] float32, or less where nothing else is merged into it
    lse: Tensor  # [T, H] float32, natural log of the sum of exponentials; -inf: the row has seen no KV

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return room for a partial, of any contents."""
        return cls(
            torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device),
        )

    @classmethod
    def unseen(cls, q: Tensor, *, is_merged: bool) -> "Partial":
        """Return room for attention of q [T, H, D], which has seen no KV: out may hold anything.

        Out is of q's dtype where only one `attend_blocks` is to come, in which no query is twice (`is_merged`
        false).
        """
        out = torch.empty_like(q, dtype=torch.float32 if is_merged else q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        return cls(out, lse)

    @classmethod
    def identity(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return attention over no KV at all: `(0, -inf)`, which merging leaves everything else as it is."""
        return cls(
            torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=device),
        )
