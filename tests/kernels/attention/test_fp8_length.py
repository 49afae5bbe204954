"""Attention over 128k keys in FP8 is as near as its keys and values are, however it is cut and added."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import poisoned_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention.split_kv import SplitWorkspace, attend_slots
from loong.kernels.kv_rows import dequantized, quantized
from loong.kernels.slots import SlotLists

SCALE, HEAD_DIM, NUM_KEYS = 0.2, 32, 1 << 17
CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor], Tensor]


def at_once(q: Tensor, rows: Tensor) -> Tensor:
    lists = SlotLists.of([torch.arange(len(rows))])
    return reference.attend_slots(q, rows, lists, scale=SCALE).out


def on_four_instances(q: Tensor, rows: Tensor) -> Tensor:
    parts = [
        reference.attend_slots(q, rows, SlotLists.of([torch.arange(i, len(rows), 4)]), scale=SCALE)
        for i in range(4)
    ]
    total = Partial.unseen(q, is_merged=True)
    reference.merge_into(total, Partial(*map(torch.stack, zip(*parts, strict=True))))
    return total.out


def as_a_prompt(q: Tensor, rows: Tensor) -> Tensor:
    total = Partial.unseen(q, is_merged=True)
    task = AttendTask.causal(0, range(len(rows) - 1, len(rows)), 0, range(len(rows)))
    reference.attend_blocks(q, rows, torch.tensor([task]), scale=SCALE, total=total)
    return total.out


def in_pieces(q: Tensor, rows: Tensor) -> Tensor:
    """Attend by the kernel of decodes."""
    out = poisoned_partial(1, 1, HEAD_DIM, q.device)
    lists = SlotLists.of([torch.arange(len(rows), device=q.device)])
    workspace = SplitWorkspace.empty(40, 1, 1, HEAD_DIM, q.device)
    attend_slots(q, rows, lists, scale=SCALE, workspace=workspace, out=out)
    return out.out


def needle(num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a query, and keys and values of which one is the query's and the others are noise."""
    kv = random_values(1, num_keys, 2, 1, HEAD_DIM, dtype=torch.float32, device=device)
    q = 2 * random_values(2, 1, 1, HEAD_DIM, dtype=torch.float32, device=device)
    kv[num_keys // 3, 0, 0] = q[0, 0]
    return q, kv


def mean(num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a query that sees all keys alike, and values whose small terms add up."""
    kv = random_values(1, num_keys, 2, 1, HEAD_DIM, dtype=torch.float32, device=device)
    kv[:, 1] = 1 + 0.01 * kv[:, 1]
    return random_values(2, 1, 1, HEAD_DIM, dtype=torch.float32, device=device) / 100, kv


def exactly(q: Tensor, keys_and_values: Tensor) -> Tensor:
    """Return the attention of one query, in float64."""
    keys, values = keys_and_values.double().unbind(1)
    return (SCALE * (keys[:, 0] @ q[0, 0].double())).softmax(0) @ values[:, 0]


def bound(q: Tensor, kv: Tensor, steps: Tensor) -> Tensor:
    """Return how far attention of one query may be off if each key and value is off by `steps`.

    If no score is off by more than d, no weight changes by more than a factor of exp(2 d).
    """
    query = q[0, 0].double()
    off = SCALE * (steps[:, 0, 0].double() @ query.abs()).max()
    weights = (SCALE * (kv[:, 0, 0].double() @ query)).softmax(0)
    by_scores = ((2 * off).exp() - 1) * (weights @ kv[:, 1, 0].abs().double())
    return by_scores + (2 * off).exp() * (weights @ steps[:, 1, 0].double())


def assert_within_bounds(attend: Attend, q: Tensor, kv: Tensor) -> Tensor:
    """Return the result. It is that of the stored values, and near that of the values they stand for."""
    rows = quantized(kv)
    stored, out = dequantized(rows, HEAD_DIM), attend(q, rows)[0, 0].double()
    torch.testing.assert_close(out, exactly(q, stored), atol=1e-5, rtol=2e-5)
    wanted, steps = exactly(q, kv), (stored - kv).abs()
    assert (steps <= 2.0**-4 * kv.abs() + 2.0**-9 * kv.abs().amax(-1, keepdim=True) / 448).all()
    assert ((out - wanted).abs() <= bound(q, kv, steps) + 1e-5).all()
    return out


@pytest.mark.parametrize("attend", [at_once, on_four_instances, as_a_prompt])
@pytest.mark.parametrize("case", [needle, mean])
@pytest.mark.parametrize("num_keys", [1 << 10, NUM_KEYS])
def test_the_error_is_bounded_by_steps_of_fp8_whatever_the_length(
    attend: Attend, case: Callable[[int, torch.device], tuple[Tensor, Tensor]], num_keys: int
) -> None:
    assert_within_bounds(attend, *case(num_keys, CPU))


def test_the_kernel_keeps_the_bound_and_finds_a_needle_in_128k_keys(device: torch.device) -> None:
    q, kv = needle(NUM_KEYS, device)
    out, wanted = assert_within_bounds(in_pieces, q, kv), exactly(q, kv)
    assert (out - wanted).abs().max() < 0.05 * wanted.abs().max()
    nearest = (kv[:, 1, 0].double() - out).norm(dim=1).argmin()
    assert int(nearest) == NUM_KEYS // 3
