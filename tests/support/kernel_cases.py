"""Building blocks of kernel tests: random values between NaN, and comparison with the definition."""

import torch
from torch import Tensor

from loong.kernels import Partial

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random_values(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return unwritten memory: every element is NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def poisoned_partial(num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> Partial:
    """Return memory for a partial that is unwritten."""
    partial = Partial.empty(num_tokens, num_heads, head_dim, device)
    return Partial(partial.out.fill_(torch.nan), partial.lse.fill_(torch.nan))


def assert_same_partial(actual: Partial, expected: Partial, dtype: torch.dtype) -> None:
    """`dtype` is that of the inputs, and sets the tolerance of `out`."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.out.float(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-4, rtol=1e-5)
