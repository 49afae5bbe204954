import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.expert_sum import expert_sum
from loong.kernels.dense.grouped_linear import grouped_linear
from loong.kernels.expert_groups import ExpertGroups


def chosen_experts(num_tokens: int, num_chosen: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """The distinct experts of each token; most tokens choose the first ones."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return (scores - 0.1 * torch.arange(num_experts)).topk(num_chosen, dim=-1).indices.to(device)


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
