import pytest
import torch
from kernel_cases import assert_same_partial, poisoned_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attention.merging import merge_into
from loong.kernels.attention.sinks import add_sinks

PARTLY_SEEN = 0.4


def draw_partial(seed: int, *shape: int, device: torch.device) -> Partial:
    """Return a partial in which some rows have seen nothing; what is not to be read of them is NaN."""
    out = random_values(seed, *shape, dtype=torch.float32, device=device)
    lse = random_values(seed + 1, *shape[:-1], dtype=torch.float32, device=device) * 10
    unseen = random_values(seed + 2, *shape[:-1], dtype=torch.float32, device=device) > PARTLY_SEEN
    return Partial(out.masked_fill(unseen[..., None], 0), lse.masked_fill(unseen, -torch.inf))


def with_unread_rows_poisoned(partial: Partial) -> Partial:
    return partial._replace(out=partial.out.masked_fill(partial.lse[..., None] == -torch.inf, torch.nan))


def both(total: Partial, parts: Partial, rows: Tensor | None) -> tuple[Partial, Partial]:
    actual, expected = (Partial(*(tensor.clone() for tensor in total)) for _ in range(2))
    merge_into(actual, parts, rows)
    reference.merge_into(expected, parts, rows)
    return actual, expected


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("shape", [(1, 1, 64), (9, 5, 96), (33, 2, 128)])
def test_merging_equals_its_definition(
    num_parts: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    total = with_unread_rows_poisoned(draw_partial(1, *shape, device=device))
    parts = with_unread_rows_poisoned(draw_partial(4, num_parts, *shape, device=device))
    assert_same_partial(*both(total, parts, None), torch.float32)


def test_parts_reach_the_rows_that_are_named_and_no_others(device: torch.device) -> None:
    total = poisoned_partial(9, 4, 64, device)
    rows = torch.tensor([7, 0, 3], device=device)
    total.lse[rows] = -torch.inf
    parts = draw_partial(4, 2, 3, 4, 64, device=device)
    actual, expected = both(total, parts, rows)
    torch.testing.assert_close(actual.out, expected.out, equal_nan=True)
    torch.testing.assert_close(actual.lse, expected.lse, equal_nan=True)
    assert actual.lse.isnan().sum() == 6 * 4


def test_parts_whose_row_is_below_0_are_left_out(device: torch.device) -> None:
    total = draw_partial(1, 5, 4, 64, device=device)
    rows = torch.tensor([-1, 3, -1, 0], device=device)
    parts = poisoned_partial(4, 4, 64, device)
    seen = draw_partial(4, 2, 4, 64, device=device)
    parts.out[rows >= 0], parts.lse[rows >= 0] = seen
    actual, expected = both(total, Partial(parts.out[None], parts.lse[None]), rows)
    assert_same_partial(actual, expected, torch.float32)
    assert torch.equal(actual.out[[1, 2, 4]], total.out[[1, 2, 4]])


def test_out_and_lse_may_come_in_one_message_and_in_half_precision(device: torch.device) -> None:
    message = random_values(1, 3, 4, 65, dtype=torch.float32, device=device)
    parts = Partial(message[None, ..., :-1], message[None, ..., -1])
    total = draw_partial(4, 3, 4, 64, device=device)
    assert_same_partial(*both(total, parts, None), torch.float32)
    rounded = parts._replace(out=parts.out.half())
    assert_same_partial(*both(total, rounded, None), torch.float32)


def test_more_tokens_than_rows_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"parts\.out must have T=3 as total\.out has, got T=4"):
        merge_into(Partial.identity(3, 2, 8, cpu), Partial(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)))


@pytest.mark.parametrize("shape", [(1, 1, 64), (9, 5, 96)])
def test_sinks_equal_their_definition_which_is_one_more_key(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> None:
    total = with_unread_rows_poisoned(draw_partial(1, *shape, device=device))
    total = total._replace(out=total.out.to(dtype))
    sinks = random_values(9, shape[1], dtype=torch.float32, device=device)
    actual, expected = (Partial(*(tensor.clone() for tensor in total)) for _ in range(2))
    add_sinks(actual, sinks)
    reference.add_sinks(expected, sinks)
    assert_same_partial(actual, expected._replace(out=expected.out.float()), dtype)
    nothing = torch.zeros(1, *shape, device=device), sinks.expand(1, *shape[:2])
    merged = Partial(total.out.float(), total.lse.clone())
    reference.merge_into(merged, Partial(*nothing))
    assert_same_partial(actual, merged, dtype)
