"""Sums and gathers over the ranks of one instance, through memory that all of them write into.

Every rank puts its shard into everybody's inbox, tells them, and waits for theirs. Then all add the same
numbers in the same order, and get bitwise the same. Epochs come from a clock on the device, which each call
moves on, so a captured call can be replayed in any batch.
"""

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.signals import EPOCHS, Patience, await_flag, raise_flag

MAX_PROGRAMS = 128  # of a call: they wait for one another, so all must find room at once
_EPOCHS = tl.constexpr(EPOCHS)
_WIDTH = 2048  # elements at once
_PATIENCE = tl.constexpr(1024)  # of all programs but the first
_ALIGNMENT = 16  # elements, and bytes: so many let every thread move 16 bytes at once
_ALIGNED = tl.constexpr(_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where the shards of `size` ranks meet, at the same offsets in bytes of each rank's memory.

    At `shards`: room [2, size, shard_bytes] by turn and source, so that a rank may begin a call while others
    end the one before; whole 16 bytes each. At `flags`: int64 [MAX_PROGRAMS, size] by program and source.
    addresses [world] int64 and opened [world] int64, a flag of each rank that says which batch it is in:
    those of this instance are `first_rank` and those after it, `rank` counts from there. clock [1] int64: the
    last epoch that was used. num_done [1] int32 of zeros. All tensors are on the device; memory, uint8, is
    this rank's own.
    """

    memory: Tensor
    addresses: Tensor
    opened: Tensor
    clock: Tensor
    num_done: Tensor
    patience: Patience
    shards: int
    shard_bytes: int
    flags: int
    first_rank: int
    rank: int
    size: int


def all_reduce(x: Tensor, inbox: Inbox) -> Tensor:
    """The sum of every rank's x, in rank order, accumulated in float32. A new tensor of x's dtype.

    Contract:
        x contiguous, floating, of the same shape on all ranks, which make the same calls in the same order.
    """
    out = torch.empty_like(x)
    _exchange(x, out, 1, inbox, is_sum=True)
    return out


def all_gather(x: Tensor, inbox: Inbox) -> Tensor:
    """Every rank's x [..., N], in rank order: [..., size * N], a new tensor. See `all_reduce`."""
    num_columns = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], inbox.size * num_columns)
    _exchange(x, out, num_columns, inbox, is_sum=False)
    return out


def _exchange(x: Tensor, out: Tensor, num_columns: int, inbox: Inbox, *, is_sum: bool) -> None:
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    room = inbox.shard_bytes // x.element_size() // num_columns * num_columns  # whole rows, to be gathered
    factor = 1 if is_sum else inbox.size
    for begin in range(0, x.numel(), room):
        num_elements = min(room, x.numel() - begin)
        _exchange_shards[(min(triton.cdiv(num_elements, _WIDTH), MAX_PROGRAMS),)](
            x.view(-1)[begin:],
            out.view(-1)[factor * begin :],
            num_elements,
            num_columns,
            inbox.memory,
            inbox.addresses,
            inbox.opened,
            inbox.clock,
            inbox.num_done,
            *inbox.patience,
            inbox.shards,
            inbox.shard_bytes,
            inbox.flags,
            inbox.first_rank,
            inbox.rank,
            size=inbox.size,
            width=_WIDTH,
            is_sum=is_sum,
            is_aligned=num_elements % _ALIGNMENT == 0,
            num_warps=8,
        )


def inbox_bytes(size: int, shard_bytes: int) -> tuple[int, int]:
    """The room that shards and flags need."""
    return prod((2, size, shard_bytes)), prod((MAX_PROGRAMS, size, 8))


@triton.jit(do_not_specialize=["num_elements", "rank", "first_rank", "limit"])
def _exchange_shards(
    x: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
    num_columns: tl.tensor,
    memory: tl.tensor,
    addresses: tl.tensor,
    opened: tl.tensor,
    clock: tl.tensor,
    num_done: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    shards: tl.tensor,
    shard_bytes: tl.tensor,
    flags: tl.tensor,
    first_rank: tl.tensor,
    rank: tl.tensor,
    size: tl.constexpr,
    width: tl.constexpr,
    is_sum: tl.constexpr,
    is_aligned: tl.constexpr,
) -> None:
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(clock) + 1
    share = tl.cdiv(num_elements, num_programs * width) * width
    begin = program * share
    end = tl.minimum(begin + share, num_elements)
    if is_aligned:
        end = tl.multiple_of(end, _ALIGNED)
    room = shards + (epoch % 2) * size * shard_bytes  # of this turn
    patience = tl.where(program == 0, 1, _PATIENCE)
    for peer in tl.static_range(size):
        at, due = first_rank + peer, epoch // _EPOCHS * _EPOCHS
        await_flag(opened + at, due, at, word, stop, limit, patience)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        values = tl.load(x + element, element < end)
        for peer in tl.static_range(size):
            shard = tl.load(addresses + first_rank + peer) + room + rank * shard_bytes
            tl.store(tl.multiple_of(shard.to(x.dtype), _ALIGNED) + element, values, element < end)
    for peer in tl.static_range(size):
        flag = tl.load(addresses + first_rank + peer) + flags + (program * size + rank) * 8
        raise_flag(flag, epoch, stop)
    own_flags = (memory + flags).to(tl.pointer_type(tl.int64)) + program * size
    for source in tl.static_range(size):
        await_flag(own_flags + source, epoch, first_rank + source, word, stop, limit, patience)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        is_element = element < end
        total = tl.zeros((width,), tl.float32)
        for source in tl.static_range(size):
            shard = tl.multiple_of((memory + room + source * shard_bytes).to(x.dtype), _ALIGNED)
            values = tl.load(shard + element, is_element, cache_modifier=".cg")
            if is_sum:
                total += values.to(tl.float32)
            else:
                row, column = element // num_columns, element % num_columns
                place = (row * size + source).to(tl.int64) * num_columns + column
                tl.store(out + place, values, is_element)
        if is_sum:
            tl.store(out + element, total.to(x.dtype.element_ty), is_element)
    if tl.atomic_add(num_done, 1) == num_programs - 1:  # all have read the clock
        tl.store(num_done, 0)
        tl.store(clock, epoch)
