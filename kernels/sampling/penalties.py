"""Penalties of a row's logits for its earlier tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.contract import Dims
from loong.kernels.sampling.draw_params import Penalties

_WIDTH = 2048  # tokens a program


def penalize(logits: Tensor, penalties: Penalties, *, out: Tensor) -> None:
    """Write the penalized logits; see `reference_draw.penalize`.

    Contract:
        logits and out [N, V] float32, contiguous, and may be the same; penalties of the same N and V.
        Allocates nothing.
    """
    dims = Dims()
    dims.bind("logits", logits, "N V", torch.float32)
    dims.bind("out", out, "N V", torch.float32)
    for name, tensor in (
        ("repetition", penalties.repetition),
        ("frequency", penalties.frequency),
        ("presence", penalties.presence),
    ):
        dims.bind(name, tensor, "N", torch.float32)
    dims.bind("is_in_prompt", penalties.is_in_prompt, "N V", torch.bool)
    dims.bind("num_in_output", penalties.num_in_output, "N V", torch.int32)
    if logits.numel() == 0:
        return
    grid = (dims["N"], triton.cdiv(dims["V"], _WIDTH))
    _penalize_tile[grid](logits, *penalties, out, dims["V"], width=_WIDTH)


@triton.jit
def _penalize_tile(
    logits: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    is_in_prompt: tl.tensor,
    num_in_output: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * width + tl.arange(0, width)
    is_token = token < size
    element = row * size + token
    x = tl.load(logits + element, is_token, 0.0)
    count = tl.load(num_in_output + element, is_token, 0)
    is_seen = (count > 0) | (tl.load(is_in_prompt + element, is_token, 0) != 0)
    factor = tl.load(repetition + row)
    x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= tl.load(frequency + row) * count
    x -= tl.where(count > 0, tl.load(presence + row), 0.0)
    tl.store(out + element, x, is_token)
