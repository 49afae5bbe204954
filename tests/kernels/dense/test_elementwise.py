import pytest
import torch
from covering import pairwise
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.core.activation import Activation
from loong.kernels import reference
from loong.kernels.dense.activation import activate_and_mul
from loong.kernels.dense.normalization import add_rms_norm


@pytest.mark.parametrize(
    ("shape", "is_wide", "has_sum"),
    pairwise([(3, 64), (2, 1000), (5, 4096), (0, 64)], [False, True], [True, False]),
)
def test_norms_equal_their_definition(
    shape: tuple[int, int], is_wide: bool, has_sum: bool, device: torch.device, dtype: torch.dtype
) -> None:
    weight = random_values(3, shape[1], dtype=torch.float32 if is_wide else dtype, device=device)
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
@pytest.mark.parametrize("activation", Activation)
def test_the_gate_equals_its_definition(
    shape: tuple[int, int], activation: Activation, device: torch.device, dtype: torch.dtype
) -> None:
    gate_up = 4 * random_values(1, shape[0], 2 * shape[1], dtype=dtype, device=device)
    out = poisoned(*shape, dtype=dtype, device=device)
    activate_and_mul(gate_up, activation, out=out)
    tolerance = TOLERANCES[dtype]
    gate, up = gate_up.chunk(2, dim=-1)
    expected = reference.activate_and_mul(gate, up, activation)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
