import pytest
import torch
from kernel_cases import poisoned, random_values

from loong.kernels import reference
from loong.kernels.rows import copy_rows


@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (8, 128), (32, 128)])
def test_rows_are_consolidated_scattered_and_both(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    source = random_values(1, 19, 2, *shape, dtype=dtype, device=device)
    rows = torch.tensor([18, 0, 7, 7, 3], device=device)
    places = torch.tensor([2, 5, -1, 0, 9], device=device)
    for source_rows, target_rows, num_rows in ((rows, None, 5), (None, places, 11), (rows, places, 11)):
        given = source if source_rows is not None else source[:5]
        actual = poisoned(num_rows, 2, *shape, dtype=dtype, device=device)
        expected = actual.clone()
        copy_rows(given, actual, source_rows=source_rows, target_rows=target_rows)
        reference.copy_rows(given, expected, source_rows=source_rows, target_rows=target_rows)
        torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


def test_rows_may_have_any_shape(device: torch.device) -> None:
    source = torch.arange(5 * 40, dtype=torch.uint8, device=device).view(5, 40)
    target = torch.zeros(3, 40, dtype=torch.uint8, device=device)
    copy_rows(source, target, source_rows=torch.tensor([4, 0, 2], device=device))
    assert torch.equal(target, source[[4, 0, 2]])


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 9])
def test_only_so_many_rows_are_copied_as_the_device_is_reported(num_rows: int, device: torch.device) -> None:
    source = random_values(1, 19, 2, 8, 128, dtype=torch.float32, device=device)
    rows = torch.tensor([18, 0, 7, 7, 3], device=device)
    places = torch.tensor([2, 5, -1, 0, 9], device=device)
    for source_rows, target_rows, size in ((rows, None, 5), (None, places, 11), (rows, places, 11)):
        actual = poisoned(size, 2, 8, 128, dtype=torch.float32, device=device)
        found = []
        for copy in (copy_rows, reference.copy_rows):
            target, reported = actual.clone(), torch.tensor([num_rows], device=device)
            given = source if source_rows is not None else source[:5]
            copy(given, target, source_rows=source_rows, target_rows=target_rows, num_rows=reported)
            found.append(target)
        torch.testing.assert_close(*found, atol=0, rtol=0, equal_nan=True)


def test_no_rows_are_no_work(device: torch.device) -> None:
    target = poisoned(3, 2, 1, 64, dtype=torch.float32, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    copy_rows(target[:0], target, target_rows=nothing)
    assert target.isnan().all()


def test_rows_of_another_number_are_refused() -> None:
    source, target = torch.zeros(4, 2, 1, 8), torch.zeros(9, 2, 1, 8)
    with pytest.raises(ValueError, match="target_rows must have T=4 as source has, got T=3"):
        copy_rows(source, target, target_rows=torch.arange(3))
    with pytest.raises(ValueError, match=r"target must be torch.float32, got torch.float64"):
        copy_rows(source, target.double(), target_rows=torch.arange(4))
    with pytest.raises(ValueError, match=r"target must have rows \[2, 1, 8\] as source has, got \[2, 8, 1\]"):
        copy_rows(source, target.view(9, 2, 8, 1), target_rows=torch.arange(4))
