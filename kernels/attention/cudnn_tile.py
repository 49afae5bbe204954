"""Attention of a tile of queries over rows of KV by cuDNN, which plans each shape once."""

import torch
from torch import Tensor

from loong.kernels.partial import Partial


def attend_tile(q: Tensor, kv: Tensor, scale: float, *, is_causal: bool, num_pieces: int = 1) -> Partial:
    """Return attention of q [T, H, D] over P equal pieces of kv [S, 2, K, D]: out [P, T, H, D], lse [P, T,
    H].

    `out` has q's dtype. P is 1 for a causal tile.
    """
    pieces = kv.view(num_pieces, -1, *kv.shape[1:])
    k, v = (part.transpose(1, 2) for part in pieces.unbind(2))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1).expand(num_pieces, -1, -1, -1), k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return Partial(out.transpose(1, 2), lse.view(*lse.shape[:3]).transpose(1, 2))
