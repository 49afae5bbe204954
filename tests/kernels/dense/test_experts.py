import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values

from loong.kernels import reference
from loong.kernels.dense.expert_sum import expert_sum
from loong.kernels.dense.fp8 import quantize_rows
from loong.kernels.dense.grouped_linear import fp8_linear, grouped_linear
from loong.kernels.dense.routing import MOST_PAIRS, choose_experts, group_pairs
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
    ("num_tokens", "num_chosen", "num_experts"),
    [(0, 2, 4), (1, 8, 128), (9, 3, 5), (70, 2, 8), (128, 8, 128), (1024, 2, 2)],
)
def test_pairs_are_grouped_in_one_launch_as_by_their_definition(
    num_tokens: int, num_chosen: int, num_experts: int, device: torch.device
) -> None:
    chosen = chosen_experts(num_tokens, num_chosen, num_experts, device)
    found, expected = group_pairs(chosen, num_experts), ExpertGroups.of(chosen, num_experts)
    assert found.block_size == expected.block_size
    for name in ("pairs", "starts", "block_experts"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    is_used = expected.block_experts < num_experts
    assert torch.equal(found.block_starts[is_used], expected.block_starts[is_used])


@pytest.mark.parametrize("num_experts", [8, 5, 128])
def test_kernels_of_few_pairs_are_the_same_for_any_number(num_experts: int, device: torch.device) -> None:
    """Triton compiles a kernel anew if an address is a multiple of 16 bytes for one call but not for another.

    Serving would wait for that, as the warm-up has few numbers of tokens.
    """
    for num_pairs in range(1, 300):
        groups = ExpertGroups.empty(num_pairs, num_experts, device)
        for name in ("pairs", "starts", "block_experts", "block_starts"):
            assert getattr(groups, name).data_ptr() % 16 == 0, (num_pairs, name)


def test_more_pairs_than_a_program_sorts_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_PAIRS} pairs, got {MOST_PAIRS + 1}"):
        group_pairs(torch.zeros(MOST_PAIRS + 1, 1, dtype=torch.int64, device=device), 4)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(0, 2, 4), (3, 8, 128), (9, 3, 5), (70, 1, 2), (2, 4, 4)]
)
def test_the_likeliest_experts_are_chosen_with_their_shares(
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    is_normalized: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    rows = [torch.randperm(num_experts, device=device) for _ in range(num_tokens)]
    logits = (torch.stack(rows) if rows else torch.empty(0, num_experts, device=device)).to(dtype) / 8
    found = []
    for function in (choose_experts, reference.choose_experts):
        chosen = torch.full((num_tokens, num_chosen), -1, device=device)
        weights = poisoned(num_tokens, num_chosen, dtype=torch.float32, device=device)
        function(logits, is_normalized=is_normalized, chosen=chosen, weights=weights)
        found.append((chosen, weights))
    (chosen, weights), (expected, expected_weights) = found
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_is_chosen_first(device: torch.device) -> None:
    chosen, weights = torch.empty(1, 3, dtype=torch.int64, device=device), torch.empty(1, 3, device=device)
    choose_experts(torch.zeros(1, 6, device=device), is_normalized=True, chosen=chosen, weights=weights)
    assert chosen.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice):RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("num_experts", [5, 8])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_token_without_finite_logits_has_experts_but_no_shares(
    num_experts: int, wrong: float, is_normalized: bool, device: torch.device
) -> None:
    """So its result is NaN, its request fails, and others go on: an expert that is none stops an instance."""
    logits = torch.randn(3, num_experts, generator=torch.Generator().manual_seed(1)).to(device)
    logits[1] = wrong
    found = []
    for function in (choose_experts, reference.choose_experts):
        chosen = torch.full((3, 4), -1, device=device)
        weights = poisoned(3, 4, dtype=torch.float32, device=device)
        function(logits, is_normalized=is_normalized, chosen=chosen, weights=weights)
        found.append((chosen, weights))
    (chosen, weights), (expected, expected_weights) = found
    assert torch.equal(chosen[::2], expected[::2])
    assert chosen[1].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)
    assert weights[1].isnan().all()


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
