"""Decode attention by LightLLM's kernel, on a view of this project's pool.

LightLLM keeps keys and values of a slot together as well, so its `flash_decode_stage1` runs on keys
`kv[:, 0]` and values `kv[:, 1]`. Each of its blocks is given as a request of its own here, so space grows
with the tokens and not with the longest request. Merging is deterministic.
"""

import torch
from torch import Tensor

from loong.kernels.contract import Dims
from loong.kernels.partial import Partial
from loong.kernels.slots import SlotLists

HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)  # on GPUs, where its products of float32 are of TF32
_BLOCK = 128  # slots


def attend_slots(q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
    """Attend one query of each request to that request's slots, into `out`; see `reference.attend_slots`.

    Contract:
        q [B, H, D], B above 0; kv [num_slots, 2, K, D] of q's dtype, contiguous. H is a multiple of K, and D
            one of HEAD_DIMS; on GPUs q has one of DTYPES.
        lists: of the same B requests, whose slots are rows of kv (not checked), each in one list.
        out: contiguous; lse is in float32.
        Another scale than that of D rounds the queries to their dtype.
        Accumulates in float32. Does not wait for the host, and allocates its workspace.
    """
    # Not at the top: an optional package.
    from lightllm.models.llama.triton_kernel.gqa_flash_decoding_stage1 import flash_decode_stage1

    dims = Dims()
    dims.bind("q", q, "B H D")
    dims.bind("kv", kv, "S 2 K D", q.dtype)
    dims.bind("out.lse", out.lse, "B H", torch.float32)
    if dims["D"] not in HEAD_DIMS:
        raise ValueError(f"LightLLM's kernel has head dims {HEAD_DIMS}, got {dims['D']}")
    if q.is_cuda and q.dtype not in DTYPES:
        raise ValueError(f"LightLLM's kernel has dtypes {DTYPES} on GPUs, got {q.dtype}")
    if not len(lists.slots):
        out.out.zero_()
        out.lse.fill_(-torch.inf)
        return
    num_requests = dims["B"]
    lengths = lists.cu_seqlens.diff().long()
    counts = (lengths + _BLOCK - 1) // _BLOCK  # blocks of each request
    ends = counts.cumsum(0)
    block = torch.arange(len(lists.slots) // _BLOCK + num_requests, device=q.device)  # no fewer than all
    owner = torch.searchsorted(ends, block, right=True)  # B: no request's
    request = owner.clamp(max=num_requests - 1)
    first = (block - (ends - counts)[request]) * _BLOCK
    num_keys = (lengths[request] - first).clamp(max=_BLOCK).where(owner < num_requests, 0)
    parts = Partial(
        q.new_zeros(len(block), dims["H"], 1, dims["D"], dtype=torch.float32),
        q.new_full((len(block), dims["H"], 1), -torch.inf, dtype=torch.float32),
    )
    flash_decode_stage1(
        block.int(),
        torch.zeros_like(block, dtype=torch.int32),
        (q * (scale * dims["D"] ** 0.5))[request],  # its own scale is of the usual head
        kv[:, 0],
        kv[:, 1],
        lists.slots.as_strided((len(lists.slots), 1), (1, 1)),  # so that any slot begins a row
        lists.starts[request] + first,
        num_keys.int(),
        *parts,
        _BLOCK,
    )
    _merge(Partial(parts.out[:, :, 0], parts.lse[:, :, 0]), counts, request, out)


def _merge(parts: Partial, counts: Tensor, request: Tensor, out: Partial) -> None:
    """Merge parts [N, H, D] into `out` [B, H, D]: `counts` [B] of each request in turn, and others unused."""
    unused = len(request) - counts.sum(0, keepdim=True)
    sizes = torch.cat([counts, unused])

    def reduced(values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=sizes, unsafe=True)[: len(counts)]

    highest = reduced(parts.lse, "max")
    highest = highest.where(highest > -torch.inf, 0.0)
    weight = (parts.lse - highest[request]).exp()
    total = reduced(weight, "sum")
    summed = reduced(parts.out * weight[..., None], "sum")
    out.out.copy_(summed / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    out.lse.copy_(highest + total.log())
