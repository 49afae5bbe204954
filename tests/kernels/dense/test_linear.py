import pytest
import torch
from kernel_cases import TOLERANCES, poisoned, random_values
from torch import Tensor

from loong.kernels import reference
from loong.kernels.dense.linear import LinearWorkspace, is_faster, linear

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


@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 33])
@pytest.mark.parametrize(
    ("num_columns", "size"),
    [(64, 1000), (65, 1024), (100, 8), (200, 520), (300, 2048), (1000, 256), (1, 2072)],
)
def test_products_equal_their_definition(
    num_rows: int, num_columns: int, size: int, device: torch.device
) -> None:
    x, weight, bias = operands(num_rows, num_columns, size, device)
    tolerance = TOLERANCES[x.dtype]
    for given in (None, bias):
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


def test_what_the_kernel_does_not_take_is_refused(device: torch.device) -> None:
    x, weight, _ = operands(3, 10, 12, device)
    with pytest.raises(ValueError, match=r"no tiling for x \[3, 12\] of .* and weight \[10, 12\]"):
        products(x, weight)
    with pytest.raises(ValueError, match="no tiling for x"):
        products(torch.zeros(3, 16, device=device), torch.zeros(10, 16, device=device))
