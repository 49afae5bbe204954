"""Products of weights in FP8 with activations that are quantized for them."""

from collections.abc import Callable

import torch
from torch import Tensor

from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.fp8_rows import FP8
from loong.model.quantization.fp8 import Fp8Matrix

_MULTIPLE = 16  # of sizes that the library takes


def fp8_product(
    x: Tensor,
    weight: Fp8Matrix,
    groups: ExpertGroups | None,
    quantize: Callable[..., None],
    multiply: Callable[..., None],
    multiply_few: Callable[[Tensor, Tensor, Fp8Matrix, torch.dtype], Tensor | None] | None = None,
) -> Tensor:
    """Return x mapped by a weight, given the kernels `quantize_rows` and `fp8_linear`.

    Whole rows with one scale are multiplied by `multiply_few`. Where that returns None, as for many rows, the
    library multiplies them on GPUs.
    """
    num_groups = weight.scales.shape[-1]
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), num_groups, dtype=torch.float32, device=x.device)
    quantize(x, weight.group_size, values=values, scales=scales)
    has_whole_rows = groups is None and num_groups == 1
    if has_whole_rows and multiply_few is not None:
        few = multiply_few(values, scales, weight, x.dtype)
        if few is not None:
            return few
    is_even = not any(size % _MULTIPLE for size in weight.values.shape)
    if has_whole_rows and is_even and x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return torch._scaled_mm(
            values, weight.values.T, scale_a=scales, scale_b=weight.scales.T, out_dtype=x.dtype
        )
    matrices = weight.values if groups else weight.values[None]
    matrix_scales = weight.scales if groups else weight.scales[None]
    out = x.new_empty(len(groups.pairs) if groups else len(x), matrices.shape[1])
    multiply(values, scales, matrices, matrix_scales, group_size=weight.group_size, groups=groups, out=out)
    return out
