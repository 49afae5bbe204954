"""Attention of long prompts: what a library computes of it, and the whole."""

from collections.abc import Sequence

import pytest
import torch

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial
from loong.kernels.attend_task import AttendTask
from loong.kernels.slots import SlotLists
from loong.model.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

TASKS = {
    "a prompt": [AttendTask.causal(0, range(17_000), 0, range(17_000))],
    "a chunk behind a history": [AttendTask.causal(0, range(30_000, 33_500), 0, range(33_500))],
    "a prompt beyond the largest square": [AttendTask.causal(0, range(70_000), 0, range(70_000))],
    "a stripe behind its own": [AttendTask.causal(0, range(0, 72_000, 4), 0, range(1, 72_000, 4))],
    "a chunk behind others": [
        AttendTask.full(0, 700, 0, 3_000),
        AttendTask.causal(700, range(30_000, 33_300), 3_000, range(33_300)),
    ],
    "two prompts": [
        AttendTask.causal(0, range(9_000), 0, range(9_000)),
        AttendTask.full(9_000, 2_500, 9_000, 6_000),
    ],
}


@pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("has_slots", [False, True])
def test_tiles_and_the_rest_attend_what_the_whole_does(tasks: Sequence[AttendTask], has_slots: bool) -> None:
    num_queries = max(task.query_row + task.num_queries for task in tasks)
    num_keys = max(task.key_row + task.num_keys for task in tasks)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    q = torch.randn(num_queries, 8, 128, dtype=torch.bfloat16, device=device)
    kv = torch.randn(num_keys, 2, 2, 128, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(num_keys, device=device) if has_slots else None
    found = []
    for dtype in (torch.bfloat16, torch.float32):  # the second has no tiles
        cuda = CudaDevice(0, dtype)
        table = cuda.table(tasks)
        assert bool(table.tiles) == (dtype == torch.bfloat16)
        total = Partial.unseen(q, is_merged=True)
        cuda.attend_blocks(q, kv, table, scale=128**-0.5, total=total, slots=slots)
        found.append(total)
    assert_close(*found)


@pytest.mark.fa3
@pytest.mark.parametrize("tasks", TASKS.values(), ids=TASKS)
def test_flash_attention_3_attends_what_cudnn_does(tasks: Sequence[AttendTask]) -> None:
    num_queries = max(task.query_row + task.num_queries for task in tasks)
    num_keys = max(task.key_row + task.num_keys for task in tasks)
    q = torch.randn(num_queries, 8, 128, dtype=torch.bfloat16, device="cuda:0")
    kv = torch.randn(num_keys, 2, 2, 128, dtype=torch.bfloat16, device="cuda:0")
    found = []
    for kernels in (AttentionKernels.FA3, AttentionKernels.CUDNN):
        cuda = CudaDevice(0, torch.bfloat16, kernels=kernels)
        cuda.plan_attention(q[:1], kv[:1])
        table = cuda.table(tasks)
        assert table.tiles
        total = Partial.unseen(q, is_merged=True)
        cuda.attend_blocks(q, kv, table, scale=128**-0.5, total=total)
        found.append(total)
    assert_close(*found)


@pytest.mark.lightllm
def test_decodes_by_lightllm_are_captured_and_equal_those_of_own_kernels() -> None:
    lists = SlotLists.of([torch.randperm(5000, device="cuda:0")[:n] for n in (1, 700, 3000)])
    q = torch.randn(3, 8, 128, dtype=torch.bfloat16, device="cuda:0")
    kv = torch.randn(5000, 2, 2, 128, dtype=torch.bfloat16, device="cuda:0")
    found = []
    for kernels in (AttentionKernels.LIGHTLLM, AttentionKernels.TRITON):
        cuda, out = (
            CudaDevice(0, torch.bfloat16, kernels=kernels),
            Partial.empty(3, 8, 128, torch.device("cuda", 0)),
        )
        cuda.attend_slots(q, kv, lists, scale=128**-0.5, out=out)
        expected = out.out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.attend_slots(q, kv, lists, scale=128**-0.5, out=out)
        out.out.zero_()
        graph.replay()
        assert torch.equal(out.out, expected)
        found.append(out)
    assert_close(*found)


@pytest.mark.parametrize("num_queries", [512, 600, 1000, 5000])
def test_rectangles_are_merged_with_one_another_and_report_what_others_need_to_merge_them(
    num_queries: int,
) -> None:
    q = torch.randn(num_queries, 8, 128, dtype=torch.bfloat16, device="cuda:0")
    kv = torch.randn(32768, 2, 2, 128, dtype=torch.bfloat16, device="cuda:0")
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        cuda = CudaDevice(0, dtype)
        table = cuda.table([AttendTask.full(0, num_queries, 0, len(kv))])
        assert (table.turns == ()) == table.is_merged == (dtype == torch.bfloat16)
        total = Partial.unseen(q, is_merged=True)
        cuda.attend_blocks(q, kv, table, scale=128**-0.5, total=total)
        found.append(total)
    assert_close(*found)


def test_a_square_that_is_merged_with_nothing_reports_what_others_need_to_merge_it() -> None:
    cuda, tasks = CudaDevice(0, torch.bfloat16), [AttendTask.causal(0, range(8192), 0, range(8192))]
    q = torch.randn(8192, 8, 128, dtype=torch.bfloat16, device="cuda:0")
    kv = torch.randn(8192, 2, 2, 128, dtype=torch.bfloat16, device="cuda:0")
    table = cuda.table(tasks)
    assert (len(table.tiles), table.turns, table.is_merged) == (1, (), False)
    found = []
    for is_merged in (False, True):
        total = Partial.unseen(q, is_merged=is_merged)
        cuda.attend_blocks(q, kv, table, scale=128**-0.5, total=total)
        found.append(total)
    assert found[0].out.dtype == torch.bfloat16
    assert_close(found[0]._replace(out=found[0].out.float()), found[1])


def assert_close(found: Partial, expected: Partial) -> None:
    """Within what bfloat16 keeps of a library's output."""
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-3, atol=1e-3)
    seen = expected.lse > -torch.inf
    torch.testing.assert_close(found.out[seen], expected.out[seen], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("num_rows", [1, 1024, 2500])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_shared_device_computes_the_same_product_in_parts(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    cuda = CudaDevice(0, torch.float32)
    x, weight = torch.randn(num_rows, 96, device="cuda:0"), torch.randn(20_000, 96, device="cuda:0")
    bias = torch.randn(20_000, device="cuda:0") if has_bias else None
    whole = cuda.linear(x, weight, bias)
    with cuda.shared():
        assert_near(cuda.linear(x, weight, bias), whole)


@pytest.mark.parametrize("num_queries", [200, 1500])
def test_a_shared_device_attends_many_keys_in_turns(num_queries: int) -> None:
    torch.manual_seed(0)
    cuda, most_keys = CudaDevice(0, torch.float32), 70_000
    q = torch.randn(num_queries + 300, 4, 64, device="cuda:0")
    kv = torch.randn(most_keys + 900, 2, 1, 64, device="cuda:0")
    positions = range(most_keys - num_queries, most_keys)
    tasks = [
        AttendTask.causal(0, positions, 0, range(most_keys)),
        AttendTask.full(num_queries, 300, most_keys, 900),
    ]
    found, tables = [], [cuda.table(tasks)]
    with cuda.shared():
        tables.append(cuda.table(tasks))
    for table in tables:
        total = Partial.unseen(q, is_merged=True)
        cuda.attend_blocks(q, kv, table, scale=0.1, total=total)
        found.append(total)
    assert (
        [len(table.turns) > 1 for table in tables] == [table.is_merged for table in tables] == [False, True]
    )
    assert_near(found[1].lse, found[0].lse)
    assert_near(found[1].out, found[0].out)


def test_a_device_stays_shared_for_the_batch_after_it_was() -> None:
    cuda, tasks = CudaDevice(0, torch.float32), [AttendTask.full(0, 1, 0, 1 << 24)]

    def is_shared() -> bool:
        return len(cuda.table(tasks).turns) > 1

    assert not is_shared()
    with cuda.shared():
        assert is_shared()
        cuda.next_batch()
        cuda.next_batch()
        assert is_shared()
    assert is_shared()
    cuda.next_batch()
    assert is_shared()
    cuda.next_batch()
    assert not is_shared()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
