from collections.abc import Sequence

import pytest
import torch
from kernel_cases import TOLERANCES, assert_same_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention.block_pieces import PieceWorkspace
from loong.kernels.attention.shared import attend_shared
from loong.kernels.shared_table import SharedTable

SCALE = 0.3
NUM_ROWS = 23  # of queries; those in no group keep what they have
NO_TASK = AttendTask(0, 0, 0, 0, 0, 0, 0, 0)


def table_of(
    rows: Sequence[int], groups: Sequence[tuple[int, range, int]], device: torch.device
) -> SharedTable:
    """Return groups of a level, places of `rows`, and a number of keys, in a table of fixed length."""
    tasks, num_keys = [], 0
    for level, places, its_keys in groups:
        row = level * len(rows) + places.start
        tasks.append(AttendTask.full(row, len(places), num_keys, its_keys))
        num_keys += its_keys
    tasks += [NO_TASK] * (64 - len(tasks))
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:num_keys]
    num_levels = 1 + max([level for level, _, _ in groups], default=0)
    return SharedTable(
        torch.tensor(rows, device=device),
        num_levels,
        torch.tensor(tasks, dtype=torch.int64, device=device),
        slots.to(device),
    )


TREE = (  # a root, two children, and a child of one of these; two places are unused
    [7, 3, 20, 0, 11, 9, 2, -1, -1],
    [(0, range(6), 70), (1, range(3), 9), (1, range(3, 6), 33), (2, range(1, 3), 5)],
)
CASES = {
    "one group": ([4, 2, 9], [(0, range(3), 130)]),
    "two groups": ([4, 2, 9, 1], [(0, range(2), 40), (0, range(2, 4), 17)]),
    "tree": TREE,
    "nothing": ([-1, -1], []),
}


def before(num_heads: int, head_dim: int, device: torch.device) -> Partial:
    """Return what queries have seen; every third has seen nothing, and is not initialized."""
    out = random_values(3, NUM_ROWS, num_heads, head_dim, dtype=torch.float32, device=device)
    lse = random_values(4, NUM_ROWS, num_heads, dtype=torch.float32, device=device)
    out[::3], lse[::3] = torch.nan, -torch.inf
    return Partial(out, lse)


def seen(partial: Partial) -> Partial:
    return partial._replace(out=partial.out.where(partial.lse[..., None] > -torch.inf, 0.0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 16)])
def test_one_pass_equals_its_definition(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    table = table_of(*CASES[name], device)
    kv = random_values(1, 200, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    q = random_values(2, NUM_ROWS, num_heads, head_dim, dtype=dtype, device=device)
    actual, expected = (before(num_heads, head_dim, device) for _ in range(2))
    workspace = PieceWorkspace.empty(2, head_dim, device)
    attend_shared(q, kv, table, scale=SCALE, total=actual, workspace=workspace)
    reference.attend_shared(q, kv, table, scale=SCALE, total=expected)
    assert_same_partial(seen(actual), seen(expected), dtype)


def each_alone(q: Tensor, kv: Tensor, rows: Sequence[int], num_keys: int, slots: Tensor) -> Partial:
    keys = kv[slots[:num_keys]]
    parts = [reference.attend(q[r : r + 1], keys[:, 0], keys[:, 1], scale=SCALE) for r in rows]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


@pytest.mark.parametrize("num_sharers", [1, 5, 256])
def test_the_definition_equals_the_attention_of_each_query_alone(num_sharers: int) -> None:
    device = torch.device("cpu")
    rows = list(range(num_sharers))
    table = table_of(rows, [(0, range(num_sharers), 61)], device)
    kv = random_values(1, 200, 2, 2, 16, dtype=torch.float32, device=device)
    q = random_values(2, num_sharers, 4, 16, dtype=torch.float32, device=device)
    total = Partial.unseen(q, is_merged=True)
    reference.attend_shared(q, kv, table, scale=SCALE, total=total)
    alone, tolerance = each_alone(q, kv, rows, 61, table.slots), TOLERANCES[torch.float32] / 10
    torch.testing.assert_close(total.out, alone.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(total.lse, alone.lse, atol=tolerance, rtol=tolerance)
