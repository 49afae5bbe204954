import pytest
import torch
from kernel_cases import assert_same_partial, poisoned, poisoned_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attention.split_kv import SplitWorkspace, attend_slots
from loong.kernels.slots import SlotLists

SCALE = 0.3
RAGGED = (0, 1, 63, 64, 0, 130, 7, 0)


def pool_with(
    lengths: tuple[int, ...], num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, SlotLists]:
    """Return a pool in which these lists of slots are scattered; every other slot holds NaN."""
    num_slots = 2 * sum(lengths) + 3
    shuffled = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).to(device)
    lists = SlotLists.of(list(torch.split(shuffled[: sum(lengths)], list(lengths))))
    kv = poisoned(num_slots, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    kv[lists.slots] = random_values(2, sum(lengths), 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    return kv, lists


def attend(q: Tensor, kv: Tensor, lists: SlotLists, num_cuts: int) -> Partial:
    num_requests, num_heads, head_dim = q.shape
    room = poisoned_partial(num_cuts + num_requests + 1, num_heads, head_dim, q.device)
    out = poisoned_partial(num_requests, num_heads, head_dim, q.device)
    attend_slots(q, kv, lists, scale=SCALE, workspace=SplitWorkspace(num_cuts, room), out=out)
    return out


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 80), (7, 1, 96), (3, 3, 128), (17, 1, 256)]
)
def test_split_attention_equals_its_definition(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    kv, lists = pool_with(RAGGED, num_kv_heads, head_dim, dtype, device)
    q = random_values(3, len(RAGGED), num_heads, head_dim, dtype=dtype, device=device)
    actual = attend(q, kv, lists, num_cuts=3)
    assert_same_partial(actual, reference.attend_slots(q, kv, lists, scale=SCALE), dtype)


@pytest.mark.parametrize("num_cuts", [1, 5, 12])
@pytest.mark.parametrize("lengths", [(300,), RAGGED, (64, 64, 64), (1,) * 9, (0, 0)])
def test_the_number_of_cuts_changes_nothing(
    lengths: tuple[int, ...], num_cuts: int, device: torch.device
) -> None:
    kv, lists = pool_with(lengths, 2, 64, torch.float32, device)
    q = random_values(3, len(lengths), 4, 64, dtype=torch.float32, device=device)
    actual = attend(q, kv, lists, num_cuts)
    assert_same_partial(actual, reference.attend_slots(q, kv, lists, scale=SCALE), torch.float32)


def test_lists_may_lie_apart_and_queries_between_other_rows(device: torch.device) -> None:
    kv, lists = pool_with((5, 70), 2, 64, torch.float32, device)
    far = torch.full((200,), 10**9, device=device)  # no slot: reading it would be seen
    far[20:25], far[90:160] = lists.list_of(0), lists.list_of(1)
    apart = SlotLists(far, torch.tensor([20, 90], device=device), lists.cu_seqlens)
    qkv = poisoned(2, 8, 64, dtype=torch.float32, device=device)
    qkv[:, :4] = random_values(3, 2, 4, 64, dtype=torch.float32, device=device)
    actual = attend(qkv[:, :4], kv, apart, num_cuts=2)
    assert_same_partial(actual, reference.attend_slots(qkv[:, :4], kv, lists, scale=SCALE), torch.float32)


def test_the_last_merge_may_write_in_the_dtype_of_the_queries(device: torch.device) -> None:
    kv, lists = pool_with((70,), 2, 64, torch.float16, device)
    q = random_values(3, 1, 4, 64, dtype=torch.float16, device=device)
    out = Partial(torch.empty_like(q), torch.empty(1, 4, device=device))
    workspace = SplitWorkspace.empty(2, 1, 4, 64, device)
    attend_slots(q, kv, lists, scale=SCALE, workspace=workspace, out=out)
    assert torch.equal(out.out, attend(q, kv, lists, num_cuts=2).out.to(torch.float16))


def test_a_workspace_of_too_few_requests_is_refused() -> None:
    cpu = torch.device("cpu")
    kv, lists = pool_with((3, 4), 2, 64, torch.float32, cpu)
    q, workspace = torch.zeros(2, 4, 64), SplitWorkspace.empty(5, 1, 4, 64, cpu)
    with pytest.raises(ValueError, match="has room for 1 requests, got 2"):
        attend_slots(q, kv, lists, scale=SCALE, workspace=workspace, out=poisoned_partial(2, 4, 64, cpu))


@pytest.mark.gpu
def test_a_captured_graph_follows_lists_that_grow() -> None:
    device = torch.device("cuda")
    kv, full = pool_with((90, 40), 2, 128, torch.bfloat16, device)
    q = random_values(3, 2, 8, 128, dtype=torch.bfloat16, device=device)
    out, workspace = poisoned_partial(2, 8, 128, device), SplitWorkspace.empty(4, 2, 8, 128, device)
    lists = full._replace(cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32, device=device))
    attend_slots(q, kv, lists, scale=SCALE, workspace=workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_slots(q, kv, lists, scale=SCALE, workspace=workspace, out=out)
    for ends in ([0, 80, 120], [0, 90, 130], [0, 0, 7]):
        lists.cu_seqlens.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert_same_partial(out, reference.attend_slots(q, kv, lists, scale=SCALE), torch.bfloat16)
