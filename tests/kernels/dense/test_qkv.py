import pytest
import torch
from covering import pairwise
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.qkv import rotate_and_store


@pytest.mark.parametrize(
    ("heads", "has_bias", "norms_are_wide"),
    pairwise([(4, 2, 64), (7, 1, 80), (32, 8, 128)], [False, True], [None, False, True]),
)
def test_finished_projections_equal_their_definition(
    heads: tuple[int, int, int],
    has_bias: bool,
    norms_are_wide: bool | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_all = num_heads + 2 * num_kv_heads
    norms: dict[str, torch.Tensor] = {}
    if norms_are_wide is not None:
        wide = torch.float32 if norms_are_wide else dtype
        for seed, name in ((4, "q_norm"), (5, "k_norm")):
            norms[name] = random_values(seed, head_dim, dtype=wide, device=device)

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
            **norms,
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
