import pytest
import torch
from covering import pairwise
from kernel_cases import assert_same_partial, poisoned, poisoned_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention.block_attention import attend_blocks
from loong.kernels.attention.block_pieces import PieceWorkspace

SCALE = 0.3

# One request alone, and its stripes on a group of three; history and a chunk; rows that see nothing.
CAUSAL = [AttendTask.causal(0, range(77), 0, range(77))]
STRIPE_BEFORE = [AttendTask.causal(0, range(1, 200, 3), 0, range(0, 200, 3))]
STRIPE_AFTER = [AttendTask.causal(0, range(1, 200, 3), 0, range(2, 200, 3))]
RAGGED = [
    AttendTask.full(0, 3, 5, 70),
    AttendTask.causal(3, range(10, 50), 80, range(0, 50, 2)),
    AttendTask.causal(43, range(5), 110, range(4, 9)),
    AttendTask.causal(48, range(5), 0, range(5, 60)),
    AttendTask.full(53, 2, 0, 0),
    AttendTask.full(55, 0, 0, 9),
    AttendTask.causal(55, range(64, 130), 120, range(130)),
]
LAYOUTS = {"causal": CAUSAL, "before": STRIPE_BEFORE, "after": STRIPE_AFTER, "ragged": RAGGED}


def table(tasks: list[AttendTask], device: torch.device) -> Tensor:
    return torch.tensor(tasks, dtype=torch.int64, device=device)


def kv_of(
    tasks: list[AttendTask], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return KV [S, 2, K, D] in which every row that no task reads is NaN."""
    kv = poisoned(270, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    for task in tasks:
        rows = slice(task.key_row, task.key_row + task.num_keys)
        kv[rows] = random_values(1, 270, 2, num_kv_heads, head_dim, dtype=dtype, device=device)[rows]
    return kv


def nothing_seen(num_tokens: int, num_heads: int, head_dim: int, device: torch.device) -> Partial:
    partial = poisoned_partial(num_tokens, num_heads, head_dim, device)
    return partial._replace(lse=partial.lse.fill_(-torch.inf))


def random_partial(device: torch.device) -> Partial:
    """Return a partial of 25 tokens of 2 heads of 64."""
    out = random_values(3, 25, 2, 64, dtype=torch.float32, device=device)
    return Partial(out, random_values(4, 25, 2, dtype=torch.float32, device=device))


def num_rows(tasks: list[AttendTask]) -> int:
    return max(task.query_row + task.num_queries for task in tasks)


def pieces(num_processors: int, head_dim: int, device: torch.device) -> PieceWorkspace:
    workspace = PieceWorkspace.empty(num_processors, head_dim, device)
    for memory in workspace.pieces:
        memory.fill_(torch.nan)
    return workspace


def both(
    tasks: list[AttendTask],
    q: Tensor,
    kv: Tensor,
    slots: Tensor | None = None,
    workspace: PieceWorkspace | None = None,
    window: int | None = None,
) -> tuple[Partial, Partial]:
    """Return the partials of tasks by the kernel and by the definition."""
    num_tokens, num_heads, head_dim = q.shape
    actual, expected = (nothing_seen(num_tokens, num_heads, head_dim, q.device) for _ in range(2))
    lines = table(tasks, q.device)
    if slots is not None and workspace is None:
        workspace = pieces(2, head_dim, q.device)
    attend_blocks(q, kv, lines, scale=SCALE, total=actual, slots=slots, workspace=workspace, window=window)
    reference.attend_blocks(q, kv, lines, scale=SCALE, total=expected, slots=slots, window=window)
    return actual, expected


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 96), (2, 2, 128)])
def test_blocks_equal_their_definition(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    tasks = LAYOUTS[name]
    kv = kv_of(tasks, num_kv_heads, head_dim, dtype, device)
    q = random_values(2, num_rows(tasks), num_heads, head_dim, dtype=dtype, device=device)
    assert_same_partial(*both(tasks, q, kv), dtype)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_other_head_dims_equal_the_definition(
    head_dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    kv = kv_of(CAUSAL, 2, head_dim, dtype, device)
    q = random_values(2, 77, 4, head_dim, dtype=dtype, device=device)
    assert_same_partial(*both(CAUSAL, q, kv), dtype)


@pytest.mark.parametrize("has_slots", [False, True])
def test_tables_of_any_length_equal_the_definition(has_slots: bool, device: torch.device) -> None:
    tasks = [AttendTask.causal(i, range(i % 5, i % 5 + 1), 2 * i, range(i % 5 + 1)) for i in range(66)]
    kv = kv_of(tasks, 1, 64, torch.float32, device)
    q = random_values(2, num_rows(tasks), 1, 64, dtype=torch.float32, device=device)
    slots = torch.arange(len(kv), device=device) if has_slots else None
    assert_same_partial(*both(tasks, q, kv, slots), torch.float32)


def test_keys_may_be_named_by_slots(device: torch.device, dtype: torch.dtype) -> None:
    kv = kv_of(RAGGED, 2, 64, dtype, device)
    slots = torch.randperm(270, generator=torch.Generator().manual_seed(1)).to(device)
    scattered = torch.empty_like(kv)
    scattered[slots] = kv
    q = random_values(2, num_rows(RAGGED), 4, 64, dtype=dtype, device=device)
    expected = nothing_seen(num_rows(RAGGED), 4, 64, device)
    reference.attend_blocks(q, kv, table(RAGGED, device), scale=SCALE, total=expected)
    assert_same_partial(both(RAGGED, q, scattered, slots)[0], expected, dtype)


@pytest.mark.parametrize(("name", "window", "has_slots"), pairwise(LAYOUTS, [1, 33, 90], [False, True]))
def test_windows_equal_their_definition(
    name: str, window: int, has_slots: bool, device: torch.device, dtype: torch.dtype
) -> None:
    tasks = LAYOUTS[name]
    kv = kv_of(tasks, 2, 64, dtype, device)
    q = random_values(2, num_rows(tasks), 4, 64, dtype=dtype, device=device)
    slots = torch.arange(len(kv), device=device) if has_slots else None
    assert_same_partial(*both(tasks, q, kv, slots, window=window), dtype)


@pytest.mark.parametrize("has_slots", [False, True])
def test_no_tile_before_a_window_is_read(has_slots: bool, device: torch.device, dtype: torch.dtype) -> None:
    last = [AttendTask.causal(0, range(256, 270), 0, range(270))]
    kv, q = kv_of(last, 2, 64, dtype, device), random_values(2, 14, 4, 64, dtype=dtype, device=device)
    slots = torch.arange(len(kv), device=device) if has_slots else None
    _, expected = both(last, q, kv, slots, window=40)
    kv[: 256 - 40 - 128] = torch.nan  # tiles have at most 128 keys
    actual = nothing_seen(14, 4, 64, device)
    workspace = pieces(2, 64, device) if has_slots else None
    attend_blocks(
        q, kv, table(last, device), scale=SCALE, total=actual, slots=slots, workspace=workspace, window=40
    )
    assert_same_partial(actual, expected, dtype)


BEHIND_HISTORY = [
    AttendTask.causal(0, range(600, 617), 0, range(617)),  # with two heads more rows than a tile has
    AttendTask.causal(17, range(2), 620, range(2)),
    AttendTask.full(19, 0, 0, 9),
    AttendTask.full(19, 1, 0, 0),
    AttendTask.causal(20, range(400, 406, 2), 630, range(0, 406, 2)),
    *[AttendTask(0, 0, 0, 0, 0, 0, 0, 0)] * 60,  # what a captured table has behind its tasks
]


def behind_history(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and KV of `BEHIND_HISTORY`, and slots."""
    q = random_values(2, 23, num_heads, head_dim, dtype=dtype, device=device)
    kv = random_values(1, 840, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    return q, kv, torch.randperm(840, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize(
    ("num_processors", "num_heads", "num_kv_heads", "head_dim", "is_in_row"),
    [(3, 2, 2, 64, True), (15, 2, 1, 80, False), (7, 4, 2, 80, True)],  # the second cuts the most pieces
)
def test_keys_of_few_queries_may_be_cut(
    num_processors: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_in_row: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    workspace = pieces(num_processors, head_dim, device)
    q, kv, slots = behind_history(num_heads, num_kv_heads, head_dim, dtype, device)
    assert_same_partial(*both(BEHIND_HISTORY, q, kv, None if is_in_row else slots, workspace), dtype)
    assert workspace.pieces.lse.isfinite().any()


def test_cut_keys_give_the_same_bits_again_and_are_merged_into_what_was_seen(device: torch.device) -> None:
    q, kv, slots = behind_history(2, 2, 64, torch.float32, device)
    q = torch.cat((q, q[:2]))  # two of no task
    lines, found = table(BEHIND_HISTORY, device), []
    for attend in (attend_blocks, attend_blocks, reference.attend_blocks):
        total = random_partial(device)
        total.lse[::3], total.out[::3] = -torch.inf, torch.nan  # has seen nothing
        if attend is attend_blocks:
            attend_blocks(
                q, kv, lines, scale=SCALE, total=total, slots=slots, workspace=pieces(6, 64, device)
            )
        else:
            reference.attend_blocks(q, kv, lines, scale=SCALE, total=total, slots=slots)
        found.append(total)
    assert torch.equal(found[0].out.nan_to_num(), found[1].out.nan_to_num())
    torch.testing.assert_close(found[0].out, found[2].out, atol=2e-5, rtol=2e-5, equal_nan=True)
    torch.testing.assert_close(found[0].lse, found[2].lse, atol=1e-4, rtol=1e-5)


def test_short_keys_are_not_cut(device: torch.device) -> None:
    workspace = pieces(4, 64, device)
    kv = kv_of(RAGGED, 2, 64, torch.float32, device)
    q = random_values(2, num_rows(RAGGED), 4, 64, dtype=torch.float32, device=device)
    slots = torch.arange(270, device=device)
    assert_same_partial(*both(RAGGED, q, kv, slots, workspace), torch.float32)
    assert workspace.pieces.lse.isnan().all()


def test_parts_of_the_keys_one_after_the_other_give_the_whole(device: torch.device) -> None:
    kv = kv_of(CAUSAL, 2, 64, torch.float32, device)
    q = random_values(2, 77, 4, 64, dtype=torch.float32, device=device)
    total = nothing_seen(77, 4, 64, device)
    for keys in (range(50), range(50, 77)):
        part = table([AttendTask.causal(0, range(77), keys.start, keys)], device)
        attend_blocks(q, kv, part, scale=SCALE, total=total)
    assert_same_partial(total, both(CAUSAL, q, kv)[1], torch.float32)


def test_what_is_merged_no_more_may_be_written_in_the_dtype_of_the_queries(device: torch.device) -> None:
    kv = kv_of(CAUSAL, 2, 64, torch.float16, device)
    q = random_values(2, 77, 4, 64, dtype=torch.float16, device=device)
    total = Partial(torch.empty_like(q), torch.full((77, 4), -torch.inf, device=device))
    attend_blocks(q, kv, table(CAUSAL, device), scale=SCALE, total=total)
    assert torch.equal(total.out, both(CAUSAL, q, kv)[0].out.half())


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (2, 2, 64), (4, 1, 96)])
def test_long_sequences_equal_the_definition(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    tasks = [AttendTask.causal(0, range(1001, 6002), 0, range(6001))]
    kv = random_values(1, 6001, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    q = random_values(2, 5001, num_heads, head_dim, dtype=dtype, device=device)
    slots = torch.randperm(6001, device=device)
    scattered = torch.empty_like(kv)
    scattered[slots] = kv
    actual, expected = both(tasks, q, kv)
    assert_same_partial(actual, expected, dtype)
    assert_same_partial(both(tasks, q, scattered, slots)[0], expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("is_in_row", [False, True])
@pytest.mark.parametrize("num_queries", [1, 100, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (4, 4, 64), (8, 1, 96)])
def test_a_few_queries_behind_a_long_history_equal_the_definition(
    num_queries: int, num_heads: int, num_kv_heads: int, head_dim: int, is_in_row: bool
) -> None:
    device, dtype, num_keys = torch.device("cuda"), torch.bfloat16, 20_000 + num_queries
    tasks = [AttendTask.causal(0, range(20_000, num_keys), 0, range(num_keys))]
    q = random_values(2, num_queries, num_heads, head_dim, dtype=dtype, device=device)
    kv = random_values(1, num_keys, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    workspace, slots = pieces(132, head_dim, device), torch.randperm(num_keys, device=device)
    assert_same_partial(*both(tasks, q, kv, None if is_in_row else slots, workspace), dtype)
    assert workspace.pieces.lse.isfinite().any()


def test_rows_of_no_task_are_left_as_they_are(device: torch.device) -> None:
    kv = kv_of(CAUSAL, 2, 64, torch.float32, device)
    q = random_values(2, 20, 4, 64, dtype=torch.float32, device=device)
    total = nothing_seen(20, 4, 64, device)
    attend_blocks(q, kv, table([AttendTask.full(7, 5, 0, 30)], device), scale=SCALE, total=total)
    written = torch.zeros(20, dtype=torch.bool, device=device)
    written[7:12] = True
    assert torch.equal(total.lse.isfinite().all(1), written)
    assert torch.equal(total.out.isfinite().all(-1).all(-1), written)


def test_blocks_refuse_what_their_contract_does_not_allow() -> None:
    cpu = torch.device("cpu")
    q, kv, total = torch.zeros(3, 4, 64), torch.zeros(9, 2, 2, 64), nothing_seen(3, 4, 64, cpu)
    with pytest.raises(ValueError, match=r"tasks must have shape \[C, 8\], got \[1, 7\]"):
        attend_blocks(q, kv, torch.zeros(1, 7, dtype=torch.int64), scale=SCALE, total=total)
    with pytest.raises(ValueError, match=r"kv must have shape \[S, 2, K, D\], got \[9, 1, 2, 64\]"):
        attend_blocks(q, kv[:, :1], table(CAUSAL, cpu), scale=SCALE, total=total)
    with pytest.raises(ValueError, match="slots need a workspace"):
        attend_blocks(q, kv, table(CAUSAL, cpu), scale=SCALE, total=total, slots=torch.arange(9))
    narrow = PieceWorkspace.empty(8, 32, cpu)
    with pytest.raises(ValueError, match=r"workspace\.pieces\.out must have D=64 as q has, got D=32"):
        attend_blocks(q, kv, table(CAUSAL, cpu), scale=SCALE, total=total, workspace=narrow)
