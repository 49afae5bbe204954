import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.qkv import rotate_and_store


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 80), (32, 8, 128)])
def test_finished_projections_equal_their_definition(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_bias: bool,
    has_norm: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    num_all = num_heads + 2 * num_kv_heads

    def values(seed: int, *shape: int) -> torch.Tensor:
        return random_values(seed, *shape, dtype=dtype, device=device)

    angles = random_values(2, 5, head_dim // 2, dtype=torch.float32, device=device).repeat(1, 2)
    results = []
    for function in (rotate_and_store, reference.rotate_and_store):
        q = poisoned(5, num_heads, head_dim, dtype=dtype, device=device)
        kv = poisoned(9, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        function(
            values(1, 5, num_all, head_dim),
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            q=q,
            kv=kv,
            rows=torch.tensor([4, 0, -1, 8, 1], device=device),
            bias=values(3, num_all, head_dim) if has_bias else None,
            q_norm=values(4, head_dim) if has_norm else None,
            k_norm=values(5, head_dim) if has_norm else None,
            eps=1e-5,
        )
        results.append((q, kv))
    tolerance = TOLERANCES[dtype]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_one_norm_without_the_other_is_refused() -> None:
    qkv, cos = torch.zeros(2, 4, 8), torch.zeros(2, 8)
    q, kv, rows = torch.zeros(2, 2, 8), torch.zeros(3, 2, 1, 8), torch.arange(2)
    with pytest.raises(ValueError, match="must be given together"):
        rotate_and_store(qkv, cos, cos, q=q, kv=kv, rows=rows, q_norm=torch.zeros(8))
    with pytest.raises(ValueError, match=r"qkv must have shape \[T, 4, D\], got \[2, 3, 8\]"):
        rotate_and_store(qkv[:, :3].contiguous(), cos, cos, q=q, kv=kv, rows=rows)
