"""Decode: one query a request over slots of a KV pool, with the KV cut into equal parts.

The KV of all requests forms one line of tokens, cut into `num_cuts` equal parts, across requests. One program
attends one part for one KV head. So all programs do equal work, for ragged batches as well as for one long
request, and the host needs no lengths.

A request's tokens in a cut are a piece. From each piece to the next, either the cut or the request advances
by one, so `cut + request` numbers the pieces.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.attention.pool_tile import load_key_scale, load_kv
from loong.kernels.attention.softmax import LOG2_E, MIN_WIDTH, attend_tile, join_parts, normalized
from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.kv_rows import bind_rows, fp8_rows, has_fp8
from loong.kernels.partial import Partial
from loong.kernels.slots import SlotLists

_PROGRAMS_PER_PROCESSOR = 2
_TILE_BYTES = 32768  # of keys, and as much of values
_MAX_TILE = 128  # tokens
_MIN_ROWS = 16  # of the left operand of a matrix product
_PIECES_AT_ONCE = 16
_REQUESTS_A_CUT = tl.constexpr(4)  # of average length, which a program attends in sequence


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Space for the pieces of a batch, made once, for use by one stream at a time."""

    num_cuts: int
    pieces: Partial  # out [num_cuts + B, H, D] and lse [num_cuts + B, H], for up to B requests

    @classmethod
    def empty(
        cls, num_cuts: int, max_num_requests: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "SplitWorkspace":
        """Return space for all batches of up to `max_num_requests`."""
        return cls(num_cuts, Partial.empty(num_cuts + max_num_requests, num_heads, head_dim, device))


def best_num_cuts(num_kv_heads: int, device: torch.device) -> int:
    """Return the number of cuts that fills the multiprocessors of a GPU just once."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, _PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)


def attend_slots(
    q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, workspace: SplitWorkspace, out: Partial
) -> None:
    """Attend one query of each request to that request's slots, into `out`; see `reference.attend_slots`.

    Contract:
        q [B, H, D], each token contiguous; kv [num_slots, 2, K, D] of q's dtype, or rows of bytes in FP8,
            contiguous. H is a multiple of K; scale is positive.
        lists: of the same B requests, whose slots are rows of kv (not checked).
        workspace: for B requests or more; overwritten.
        out: contiguous, in float32, or out.out in q's dtype if nothing is merged with it.
        Accumulates in float32. Does not wait for the host, and allocates nothing.
    """
    dims = _check(q, kv, lists, workspace, out)
    num_requests, num_cuts, group_size = dims["B"], workspace.num_cuts, dims.group_size()
    if num_requests == 0:
        return
    head_dim, width = dims["D"], max(MIN_WIDTH, triton.next_power_of_2(dims["D"]))
    tile = min(_MAX_TILE, _TILE_BYTES // (width * q.dtype.itemsize))
    values, scales = fp8_rows(kv) if has_fp8(kv) else (kv, None)
    _attend_cuts[dims["K"], num_cuts](
        q,
        values,
        scales,
        *lists,
        *workspace.pieces,
        scale * LOG2_E,
        q.stride(0),
        num_requests,
        max_num_requests=triton.next_power_of_2(num_requests),
        num_kv_heads=dims["K"],
        group_size=group_size,
        num_rows=max(_MIN_ROWS, triton.next_power_of_2(group_size)),
        head_dim=head_dim,
        width=width,
        tile=tile,
        num_warps=4,
        num_stages=3,
        **chain_options(),
    )
    _merge_pieces[num_requests, dims["H"]](
        *workspace.pieces,
        lists.cu_seqlens,
        *out,
        num_requests,
        num_cuts,
        head_dim=head_dim,
        width=width,
        tile=tile,
        at_once=_PIECES_AT_ONCE,
        num_warps=1,
        **chain_options(),
    )


def _check(q: Tensor, kv: Tensor, lists: SlotLists, workspace: SplitWorkspace, out: Partial) -> Dims:
    dims = Dims()
    dims.bind_rows("q", q, "B H D")
    bind_rows(dims, kv, q.dtype)
    dims.bind("lists.slots", lists.slots, "N", torch.int64)
    dims.bind("lists.starts", lists.starts, "B", torch.int64)
    dims.bind("lists.cu_seqlens[1:]", lists.cu_seqlens[1:], "B", torch.int32)
    dims.bind("out.out", out.out, "B H D", q.dtype if out.out.dtype == q.dtype else torch.float32)
    dims.bind("out.lse", out.lse, "B H", torch.float32)
    dims.bind("workspace.pieces.out", workspace.pieces.out, "P H D", torch.float32)
    dims.bind("workspace.pieces.lse", workspace.pieces.lse, "P H", torch.float32)
    max_num_requests = dims["P"] - workspace.num_cuts
    if max_num_requests < dims["B"]:
        raise ValueError(f"the workspace has room for {max_num_requests} requests, got {dims['B']}")
    return dims


@triton.jit
def _cut_size(
    cu_seqlens: tl.tensor, num_requests: tl.tensor, num_cuts: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Return the tokens of a cut: whole tiles, or less than one if requests are very short."""
    num_tokens = tl.load(cu_seqlens + num_requests)
    num_tiles = tl.cdiv(num_tokens, tile)
    few = tl.minimum(tl.cdiv(num_tokens, num_requests) * _REQUESTS_A_CUT, tile)
    part = tl.maximum(tl.maximum(few, tl.cdiv(num_tokens, num_cuts)), 1)
    return tl.where(num_tiles > num_cuts, tl.cdiv(num_tiles, num_cuts) * tile, part)


@triton.jit(do_not_specialize=["num_requests"])
def _attend_cuts(
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    cu_seqlens: tl.tensor,
    piece_out: tl.tensor,
    piece_lse: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    num_requests: tl.tensor,
    max_num_requests: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    follow(is_chained)
    kv_head, cut = tl.program_id(0), tl.program_id(1)
    size = _cut_size(cu_seqlens, num_requests, tl.num_programs(1), tile)
    begin = cut * size
    end = tl.minimum(begin + size, tl.load(cu_seqlens + num_requests))
    every = tl.arange(0, max_num_requests)
    ends = tl.load(cu_seqlens + 1 + every, every < num_requests, end)
    request = tl.sum((ends <= begin).to(tl.int64))  # the first that ends after `begin`

    row, dim = tl.arange(0, num_rows), tl.arange(0, width)
    head = kv_head * group_size + row
    element = head[:, None] * head_dim + dim[None, :]
    is_element = (row < group_size)[:, None] & (dim < head_dim)[None, :]
    while begin < end:
        stop = tl.minimum(end, tl.load(cu_seqlens + request + 1))
        if begin < stop:
            queries = tl.load(q + request * q_stride + element, is_element, 0.0)
            its_slots = slots + tl.load(starts + request) - tl.load(cu_seqlens + request)
            out, lse = _attend_piece(
                queries,
                kv,
                scales,
                its_slots,
                begin,
                stop,
                scale,
                kv_head,
                num_kv_heads,
                head_dim,
                width,
                tile,
            )
            piece = (cut + request) * (num_kv_heads * group_size)
            tl.store(piece_out + piece * head_dim + element, out, is_element)
            tl.store(piece_lse + piece + head, lse, row < group_size)
        begin = stop
        request += 1
    let_next_start(is_chained)


@triton.jit
def _attend_piece(
    queries: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Attend queries [R, D] to slots[begin:stop], at least one: return out [R, D] and lse [R]."""
    peak = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    weighted = tl.zeros([queries.shape[0], width], tl.float32)
    for start in tl.range(begin, stop, tile):
        token = start + tl.arange(0, tile)
        is_token = token < stop
        slot = tl.load(slots + token, is_token, 0)
        k, v = load_kv(kv, scales, queries, slot, is_token, kv_head, num_kv_heads, head_dim, width)
        key_scale = None
        if scales is not None:
            key_scale = load_key_scale(scales, slot, is_token, kv_head, num_kv_heads, head_dim)
        peak, total, weighted = attend_tile(
            queries, k, v, is_token[None, :], scale, key_scale, peak, total, weighted
        )
    return normalized(peak, total, weighted)


@triton.jit(do_not_specialize=["num_requests"])
def _merge_pieces(
    piece_out: tl.tensor,
    piece_lse: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_requests: tl.tensor,
    num_cuts: tl.tensor,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    at_once: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    request, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size = _cut_size(cu_seqlens, num_requests, num_cuts, tile)
    begin, end = tl.load(cu_seqlens + request), tl.load(cu_seqlens + request + 1)
    first = begin // size
    num_pieces = tl.where(begin < end, tl.cdiv(end, size) - first, 0)
    dim = tl.arange(0, width)
    is_dim = dim < head_dim
    peak, total = float("-inf"), 0.0
    weighted = tl.zeros([width], tl.float32)
    for start in tl.range(0, num_pieces, at_once):
        piece = start + tl.arange(0, at_once)
        is_piece = piece < num_pieces
        row = (request + first + piece).to(tl.int64) * num_heads + head
        part_lse = tl.load(piece_lse + row, is_piece, float("-inf"))
        elements = row[:, None] * head_dim + dim[None, :]
        part_out = tl.load(piece_out + elements, is_piece[:, None] & is_dim[None, :], 0.0)
        peak, total, weighted = join_parts(part_out, part_lse, peak, total, weighted)
    row = request.to(tl.int64) * num_heads + head
    tl.store(out + row * head_dim + dim, weighted / tl.maximum(total, 1.0), is_dim)
    tl.store(lse + row, peak + tl.log(tl.maximum(total, 1.0)))
