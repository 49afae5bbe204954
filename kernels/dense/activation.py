"""The gate of the MLP."""

import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims

_WIDTH = 2048  # elements a program


def silu_and_mul(gate_up: Tensor, *, out: Tensor) -> None:
    """Write `silu(gate) * up` of gate_up [T, 2 F], the gates first; see `reference.silu_and_mul`.

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
        gate_up, out, dims["F"], width=_WIDTH, **chain_options()
    )


@triton.jit
def _gate_tile(
    gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, width: tl.constexpr, is_chained: tl.constexpr
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    is_column = column < size
    gate = tl.load(gate_up + token * 2 * size + column, is_column, 0.0)
    up = tl.load(gate_up + token * 2 * size + size + column, is_column, 0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * size + column, active * up.to(tl.float32), is_column)
