"""The result of attention to part of the KV, the basic value of this project."""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention of T query tokens over some set of KV, normalized over that set.

    Partials over disjoint sets form a commutative monoid under `merge`, so KV may be cut anywhere.
    """

    out: Tensor  # [T, H, D] float32, or less if nothing else is merged into it
    lse: Tensor  # [T, H] float32, natural log of the sum of exponentials; -inf: the row has seen no KV

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return an uninitialized partial."""
        return cls(
            torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device),
        )

    @classmethod
    def unseen(cls, q: Tensor, *, is_merged: bool) -> "Partial":
        """Return a partial of q [T, H, D] that has seen no KV; its `out` is uninitialized.

        `out` has q's dtype if `is_merged` is false: only one `attend_blocks` follows, with no query twice.
        """
        out = torch.empty_like(q, dtype=torch.float32 if is_merged else q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        return cls(out, lse)

    @classmethod
    def identity(cls, num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> "Partial":
        """Return attention over no KV: `(0, -inf)`, the identity of `merge`."""
        return cls(
            torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=device),
        )
