"""Products of FP8 take the kernel of few rows where there is one, and give the same otherwise."""

import pytest
import torch
from torch import Tensor

from loong.kernels import reference
from loong.model.quantization.fp8 import Fp8Matrix, quantized_rows
from loong.model.quantization.product import fp8_product

MOST_FEW = 4


@pytest.mark.parametrize("num_rows", [1, MOST_FEW, MOST_FEW + 1])
def test_few_rows_and_many_are_the_product_of_the_dequantized_weight(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(num_rows, 48, generator=generator), torch.randn(32, 48, generator=generator)
    matrix, taken = quantized_rows(weight), list[int]()

    def few(values: Tensor, scales: Tensor, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor | None:
        if len(values) > MOST_FEW:
            return None
        taken.append(len(values))
        return ((values.float() * scales) @ weight.dequantized().T).to(dtype)

    found = fp8_product(x, matrix, None, reference.quantize_rows, reference.fp8_linear, few)
    assert taken == ([num_rows] if num_rows <= MOST_FEW else [])
    torch.testing.assert_close(found, x @ matrix.dequantized().T, atol=0.6, rtol=0.1)
    whole = fp8_product(x, matrix, None, reference.quantize_rows, reference.fp8_linear)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-5)
