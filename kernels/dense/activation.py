"""The gate of the MLP."""

import triton
import triton.language as tl
from torch import Tensor

from loong.core.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims

_WIDTH = 2048  # elements a program
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
_TANH_SCALE, _TANH_CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 * sqrt(2 / pi)


def activate_and_mul(gate_up: Tensor, activation: Activation = Activation.SILU, *, out: Tensor) -> None:
    """Write the activated gates times ups of gate_up [T, 2 F], the gates first; see
    `reference.activate_and_mul`.

    Contract:
        gate_up [T, 2 F] and out [T, F], of one dtype, contiguous. Rounded after the activation.
        Allocates nothing.
    """
    dims = Dims()
    dims.bind("out", out, "T F", gate_up.dtype)
    dims.bind("gate_up", gate_up, f"T {2 * dims['F']}")
    if out.numel() == 0:
        return
    _gate_tile[dims["T"], triton.cdiv(dims["F"], _WIDTH)](
        gate_up, out, dims["F"], width=_WIDTH, activation=activation.value, **chain_options()
    )


@triton.jit
def _gate_tile(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    width: tl.constexpr,
    activation: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    is_column = column < size
    gate = tl.load(gate_up + token * 2 * size + column, is_column, 0.0)
    up = tl.load(gate_up + token * 2 * size + size + column, is_column, 0.0)
    wide, factor = gate.to(tl.float32), up.to(tl.float32)
    if activation == "silu":
        active = wide / (1.0 + tl.exp(-wide))
    elif activation == "gelu_tanh":  # (1 + tanh(x)) / 2 is a sigmoid of 2 x
        power = -(wide + wide * wide * wide * _TANH_CUBE) * _TANH_SCALE
        active = wide / (1.0 + tl.exp(tl.minimum(power, 80.0)))  # finite, and so small that it is 0
    else:
        wide = tl.minimum(wide, _LIMIT)
        active = wide / (1.0 + tl.exp(-wide * _ALPHA))
        factor = tl.maximum(tl.minimum(factor, _LIMIT), -_LIMIT) + 1.0
    tl.store(out + token * size + column, active.to(gate.dtype).to(tl.float32) * factor, is_column)
