"""Attention of a tile of queries over rows of KV by FlashAttention-3, an optional package for Hopper GPUs."""

from importlib.util import find_spec

import torch
from torch import Tensor

from loong.kernels.partial import Partial

_PACKAGE = "fa3_fwd_interface"
_CAPABILITY = 9, 0  # of Hopper, whose instructions it uses
MOST_HEAD_DIM = 256


def is_installed() -> bool:
    """Return whether the package is there. It is not imported."""
    return find_spec(_PACKAGE) is not None


def is_usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the package is there and has kernels of this dtype for this GPU."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY
    return is_hopper and dtype == torch.bfloat16 and is_installed()


def attend_tile(q: Tensor, kv: Tensor, scale: float, *, is_causal: bool, num_pieces: int = 1) -> Partial:
    """Return attention of q [T, H, D] over kv [S, 2, K, D]: out [1, T, H, D] and lse [1, T, H].

    Contract:
        q, kv in bfloat16, each head's D contiguous, D up to MOST_HEAD_DIM. H is a multiple of K.
        Causal: query t sees keys 0 to t, and T is S.
        `num_pieces`: parts of the keys that are computed at the same time.
        Returns new tensors: out in q's dtype, lse (natural log) in float32.
    """
    from fa3_fwd_interface import flash_attn_func  # not at the top: an optional package

    keys, values = kv[None, :, 0], kv[None, :, 1]
    out, lse = flash_attn_func(
        q[None],
        keys,
        values,
        softmax_scale=scale,
        causal=is_causal,
        num_splits=num_pieces,
        return_attn_probs=True,
    )
    return Partial(out, lse.transpose(1, 2))
