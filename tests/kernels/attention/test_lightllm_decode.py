"""LightLLM's kernel on this project's pool equals the definition of decode attention."""

import pytest
import torch
from kernel_cases import assert_same_partial, poisoned, poisoned_partial, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.attention.lightllm_decode import attend_slots
from loong.kernels.slots import SlotLists

pytestmark = pytest.mark.lightllm


def attend(q: Tensor, kv: Tensor, lists: SlotLists) -> Partial:
    num_requests, num_heads, head_dim = q.shape
    out = poisoned_partial(num_requests, num_heads, head_dim, q.device)
    attend_slots(q, kv, lists, scale=q.shape[-1] ** -0.5, out=out)
    return out


@pytest.mark.parametrize("lengths", [(0, 1, 127, 128, 0, 300, 0), (129,), (0, 0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 32), (3, 3, 128)])
def test_scattered_slots_give_the_attention_of_the_definition(
    lengths: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_slots = 2 * sum(lengths) + 3
    shuffled = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).to(device)
    lists = SlotLists.of(list(torch.split(shuffled[: sum(lengths)], list(lengths))))
    kv = poisoned(num_slots, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    kv[lists.slots] = random_values(2, sum(lengths), 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    q = random_values(3, len(lengths), num_heads, head_dim, dtype=dtype, device=device)
    if device.type == "cuda" and dtype == torch.float32:
        with pytest.raises(ValueError, match="dtypes"):
            attend(q, kv, lists)
        return
    assert_same_partial(
        attend(q, kv, lists), reference.attend_slots(q, kv, lists, scale=q.shape[-1] ** -0.5), dtype
    )


def test_lists_may_lie_apart(device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    kv = random_values(2, 200, 2, 2, 64, dtype=dtype, device=device)
    far = torch.full((400,), 10**9, device=device)  # no slot: reading it would be seen
    far[20:25], far[90:240] = torch.arange(5, device=device), torch.arange(5, 155, device=device)
    cu_seqlens = torch.tensor([0, 5, 155], dtype=torch.int32, device=device)
    lists = SlotLists(far, torch.tensor([20, 90], device=device), cu_seqlens)
    q = random_values(3, 2, 4, 64, dtype=dtype, device=device)
    assert_same_partial(
        attend(q, kv, lists), reference.attend_slots(q, kv, lists, scale=q.shape[-1] ** -0.5), dtype
    )


def test_a_head_dim_that_the_kernel_lacks_is_refused() -> None:
    lists = SlotLists.of([torch.arange(3)])
    with pytest.raises(ValueError, match="head dims"):
        attend(torch.zeros(1, 2, 80), torch.zeros(3, 2, 2, 80), lists)
