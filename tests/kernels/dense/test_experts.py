import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.expert_sum import expert_sum
from loong.kernels.dense.fp8 import quantize_rows
from loong.kernels.dense.grouped_linear import fp8_linear, grouped_linear
from loong.kernels.expert_groups import ExpertGroups


def chosen_experts(num_tokens: int, num_chosen: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """The distinct experts of each token; most tokens choose the first ones."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return (scores - 0.1 * torch.arange(num_experts)).topk(num_chosen, dim=-1).indices.to(device)


def near_fp8(
    seed: int, num_rows: int, group_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 300 numbers, and their values in FP8, which are less than half a step nearer to 0.

    No value is rounded up to a power of two: Triton's interpreter halves such ones.
    """
    generator = torch.Generator().manual_seed(seed)
    mantissa = 8 + torch.randint(8, (num_rows, 300), generator=generator)
    values = mantissa * 2.0 ** torch.randint(5, (num_rows, 300), generator=generator)
    values *= torch.where(torch.rand(num_rows, 300, generator=generator) < 0.5, -1.0, 1.0)
    rows = values * (1 + torch.rand(num_rows, 300, generator=generator) / 33)
    rows[:, ::group_size] = values[:, ::group_size] = 448.0  # the largest of its group
    return rows.to(device) / 512, values.to(device)


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(0, 2, 4), (1, 8, 128), (9, 3, 5), (70, 2, 8), (300, 1, 2)]
)
def test_blocks_hold_every_pair_of_their_expert_once(
    num_tokens: int, num_chosen: int, num_experts: int
) -> None:
    chosen = chosen_experts(num_tokens, num_chosen, num_experts, torch.device("cpu"))
    groups = ExpertGroups.of(chosen, num_experts)
    found = []
    for expert, start in zip(groups.block_experts.tolist(), groups.block_starts.tolist(), strict=True):
        if expert < num_experts:
            stop = min(start + groups.block_size, int(groups.starts[expert + 1]))
            assert stop > start
            found += [(pair, expert) for pair in groups.pairs[start:stop].tolist()]
    assert sorted(found) == list(enumerate(chosen.flatten().tolist()))


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(0, 2, 4), (1, 2, 8), (9, 3, 5), (40, 2, 2)]
)
def test_products_of_experts_equal_their_definition(
    num_tokens: int, num_chosen: int, num_experts: int, device: torch.device, dtype: torch.dtype
) -> None:
    groups = ExpertGroups.of(chosen_experts(num_tokens, num_chosen, num_experts, device), num_experts)
    num_pairs, tolerance = num_tokens * num_chosen, TOLERANCES[dtype]
    weight = random_values(2, num_experts, 150, 72, dtype=dtype, device=device) / 72**0.5
    for num_rows in (num_tokens, num_pairs):
        x = random_values(1, num_rows, 72, dtype=dtype, device=device)
        actual, expected = (poisoned(num_pairs, 150, dtype=dtype, device=device) for _ in range(2))
        grouped_linear(x, weight, groups, out=actual)
        reference.grouped_linear(x, weight, groups, out=expected)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("group_size", [128, 300])  # of 300 columns
@pytest.mark.parametrize("num_experts", [1, 3])
def test_products_of_fp8_equal_their_definition(
    num_experts: int, group_size: int, device: torch.device
) -> None:
    num_tokens, num_chosen = 20, 2 if num_experts > 1 else 1
    groups = None
    if num_experts > 1:
        groups = ExpertGroups.of(chosen_experts(num_tokens, num_chosen, num_experts, device), num_experts)
    quantized = []
    for seed, num_rows in enumerate((num_tokens, num_experts * 70)):
        matrix, expected = near_fp8(seed, num_rows, group_size, device)
        for function in (quantize_rows, reference.quantize_rows):
            values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=device)
            scales = poisoned(num_rows, -(-300 // group_size), dtype=torch.float32, device=device)
            function(matrix, group_size, values=values, scales=scales)
            torch.testing.assert_close(values.float(), expected, atol=0, rtol=0)
            found = values.float() * scales.repeat_interleave(group_size, dim=1)[:, :300]
            torch.testing.assert_close(found, matrix, atol=0, rtol=1 / 32)
        quantized.append((values, scales))
    (x_values, x_scales), (values, scales) = quantized
    operands = x_values, x_scales, values.view(num_experts, 70, 300), scales.view(num_experts, 70, -1)
    products = []
    for multiply in (fp8_linear, reference.fp8_linear):
        out = poisoned(num_tokens * num_chosen, 70, dtype=torch.float32, device=device)
        multiply(*operands, group_size=group_size, groups=groups, out=out)
        products.append(out)
    torch.testing.assert_close(*products, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("shape", [(3, 2, 64), (2, 8, 1500), (0, 2, 64)])
def test_the_sum_over_experts_equals_its_definition(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> None:
    parts = random_values(1, *shape, dtype=dtype, device=device)
    weights = random_values(2, *shape[:2], dtype=torch.float32, device=device)
    actual, expected = (poisoned(shape[0], shape[2], dtype=dtype, device=device) for _ in range(2))
    expert_sum(parts, weights, out=actual)
    reference.expert_sum(parts, weights, out=expected)
    torch.testing.assert_close(actual, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
