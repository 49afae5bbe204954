import pytest
import torch
from covering import pairwise
from kernel_cases import TOLERANCES, poisoned, random_values
from torch import Tensor

from loong.kernels import reference
from loong.kernels.dense.linear import LinearWorkspace, Scales, is_faster, linear
from loong.kernels.fp8_rows import FP8

NUM_PROCESSORS = 4


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    workspace = LinearWorkspace.empty(NUM_PROCESSORS, x.device)
    workspace.pieces.fill_(torch.nan)
    out = poisoned(len(x), len(weight), dtype=x.dtype, device=x.device)
    linear(x, weight, bias, workspace=workspace, out=out)
    assert not workspace.num_done_pieces.any()
    return out


def operands(
    num_rows: int, num_columns: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight and a bias."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    x = random_values(1, num_rows, size, dtype=dtype, device=device)
    weight = random_values(2, num_columns, size, dtype=dtype, device=device)
    return x, weight / size**0.5, random_values(3, num_columns, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("shape", "num_rows", "has_bias"),
    pairwise(
        [(64, 1000), (65, 1024), (100, 8), (200, 520), (300, 2048), (1000, 256), (1, 2072)],
        [0, 1, 2, 16, 33],
        [False, True],
    ),
)
def test_products_equal_their_definition(
    shape: tuple[int, int], num_rows: int, has_bias: bool, device: torch.device
) -> None:
    x, weight, bias = operands(num_rows, *shape, device)
    tolerance, given = TOLERANCES[x.dtype], bias if has_bias else None
    expected = reference.linear(x, weight, given)
    torch.testing.assert_close(products(x, weight, given), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_columns", "max_num_rows"), [(24576, 128), (24575, 64), (64, 64)])
def test_the_largest_weights_take_128_rows_and_others_64(num_columns: int, max_num_rows: int) -> None:
    x, weight, _ = operands(max_num_rows + 1, num_columns, 8, torch.device("cpu"))
    assert is_faster(x[:-1], weight)
    assert not is_faster(x, weight)


def test_products_of_128_rows_equal_their_definition(device: torch.device) -> None:
    x, weight, _ = operands(128, 24576, 64, device)
    torch.testing.assert_close(products(x, weight), reference.linear(x, weight), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_columns", [64, 300, 9000])
def test_a_row_is_the_same_in_batches_of_up_to_16_and_in_all_beyond(num_columns: int) -> None:
    x, weight, _ = operands(64, num_columns, 2048, torch.device("cuda"))
    for batch, others in ((1, (3, 7, 16)), (17, (40, 64))):
        expected = products(x[:batch], weight)
        for num_rows in others:
            assert torch.equal(products(x[:num_rows], weight)[:batch], expected)


def fp8_operands(
    num_rows: int, num_columns: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Scales]:
    """x and a weight with their scales; Triton's interpreter halves powers of two, which are left out."""
    generator = torch.Generator().manual_seed(size)
    values = []
    for shape in ((num_rows, size), (num_columns, size)):
        mantissa = 9 + torch.randint(7, shape, generator=generator)
        sign = 1 - 2 * torch.randint(2, shape, generator=generator)
        values.append((sign * mantissa * 2.0 ** torch.randint(-4, 2, shape, generator=generator)).to(FP8))
    scales = [torch.rand(n, 1, generator=generator).to(device) for n in (num_rows, num_columns)]
    return values[0].to(device), values[1].to(device), Scales(*scales)


@pytest.mark.parametrize(
    ("shape", "num_rows"),
    pairwise([(64, 1024), (65, 1040), (100, 16), (300, 2048), (9000, 256), (1, 2064)], [0, 1, 16, 33]),
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_fp8_equal_their_definition(
    shape: tuple[int, int], num_rows: int, has_bias: bool, device: torch.device
) -> None:
    x, weight, scales = fp8_operands(num_rows, *shape, device)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    bias = random_values(3, shape[0], dtype=dtype, device=device) if has_bias else None
    workspace = LinearWorkspace.empty(NUM_PROCESSORS, device)
    workspace.pieces.fill_(torch.nan)
    out, expected = (poisoned(num_rows, shape[0], dtype=dtype, device=device) for _ in range(2))
    linear(x, weight, bias, workspace=workspace, out=out, scales=scales)
    reference.fp8_linear(
        *(x, scales.x, weight[None], scales.weight[None]), group_size=shape[1], groups=None, out=expected
    )
    if bias is not None:
        expected += bias
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=shape[1] * tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_columns", [64, 9000])
def test_a_row_of_fp8_is_the_same_in_batches_of_up_to_16_and_in_all_beyond(num_columns: int) -> None:
    device = torch.device("cuda")
    x, weight, scales = fp8_operands(64, num_columns, 2048, device)
    workspace = LinearWorkspace.empty(NUM_PROCESSORS, device)

    def product(num_rows: int) -> Tensor:
        out = poisoned(num_rows, num_columns, dtype=torch.bfloat16, device=device)
        given = Scales(scales.x[:num_rows], scales.weight)
        linear(x[:num_rows], weight, None, workspace=workspace, out=out, scales=given)
        return out

    for batch, others in ((1, (3, 16)), (17, (32,))):
        for num_rows in others:
            assert torch.equal(product(num_rows)[:batch], product(batch))


def test_what_the_kernel_does_not_take_is_refused(device: torch.device) -> None:
    x, weight, _ = operands(3, 10, 12, device)
    with pytest.raises(ValueError, match=r"no tiling for x \[3, 12\] of .* and weight \[10, 12\]"):
        products(x, weight)
    with pytest.raises(ValueError, match="no tiling for x"):
        products(torch.zeros(3, 16, device=device), torch.zeros(10, 16, device=device))
