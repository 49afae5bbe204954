import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.activation import silu_and_mul
from loong.kernels.dense.normalization import add_rms_norm


@pytest.mark.parametrize("has_sum", [True, False])
@pytest.mark.parametrize("shape", [(3, 64), (2, 1000), (5, 4096), (0, 64)])
def test_norms_equal_their_definition(
    shape: tuple[int, int], has_sum: bool, device: torch.device, dtype: torch.dtype
) -> None:
    weight = random_values(3, shape[1], dtype=dtype, device=device)
    results = []
    for function in (add_rms_norm, reference.add_rms_norm):
        residual = random_values(1, *shape, dtype=dtype, device=device)
        added = random_values(2, *shape, dtype=dtype, device=device) if has_sum else None
        out = poisoned(*shape, dtype=dtype, device=device)
        function(residual, weight, 1e-5, out=out, added=added)
        results.append((residual, out))
    tolerance = TOLERANCES[dtype]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5000), (0, 64)])
def test_the_gate_equals_its_definition(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    gate_up = random_values(1, shape[0], 2 * shape[1], dtype=dtype, device=device)
    out = poisoned(*shape, dtype=dtype, device=device)
    silu_and_mul(gate_up, out=out)
    tolerance = TOLERANCES[dtype]
    expected = reference.silu_and_mul(*gate_up.chunk(2, dim=-1))
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
