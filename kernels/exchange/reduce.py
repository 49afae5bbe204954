"""All-reduce and all-gather over the ranks of one instance, through memory that all of them write to.

One round (`one_round.py`) sends every shard to all ranks. A large sum of many ranks takes two, with fewer
bytes (`two_rounds.py`). All ranks add the same numbers in the same order, with bitwise equal results.

Epochs come from a clock on the device, which each call advances by two, so a captured call can be replayed
in any batch.
"""

from dataclasses import dataclass
from math import prod

import torch
import triton
from torch import Tensor

from loong.kernels.exchange.one_round import exchange_shards
from loong.kernels.exchange.rounds import ALIGNMENT
from loong.kernels.exchange.signals import Deadline
from loong.kernels.exchange.two_rounds import sum_in_parts

MAX_PROGRAMS = 128  # of a call: they wait for each other, so all must run at once
_WIDTH = 2048  # elements at once


@dataclass(frozen=True, slots=True)
class Inbox:
    """The place of the shards of `size` ranks, at the same byte offsets of each rank's memory.

    At `shards`: space [2, size, shard_bytes] by turn and source, so that a rank may begin a call while others
    end the one before. shard_bytes is a multiple of 16. At `flags`: int64 [MAX_PROGRAMS, size] by program and
    source.
    addresses [world] int64 and opened [world] int64, a flag of each rank with its batch. Those of this
    instance begin at `first_rank`, and `rank` counts from there. clock [1] int64: the last epoch used.
    num_done [1] int32 of zeros. All tensors are on the device; memory, uint8, is this rank's own.
    """

    memory: Tensor
    addresses: Tensor
    opened: Tensor
    clock: Tensor
    num_done: Tensor
    deadline: Deadline
    shards: int
    shard_bytes: int
    whole_bytes: int
    flags: int
    first_rank: int
    rank: int
    size: int


def all_reduce(x: Tensor, inbox: Inbox) -> Tensor:
    """Return the sum of all ranks' x in rank order, a new tensor of x's dtype, accumulated in float32.

    Contract:
        x contiguous, floating, of the same shape on all ranks, which make the same calls in the same order.
    """
    out = torch.empty_like(x)
    _exchange(x, out, 1, inbox, is_sum=True)
    return out


def all_gather(x: Tensor, inbox: Inbox) -> Tensor:
    """Return all ranks' x [..., N] in rank order, [..., size * N], a new tensor. See `all_reduce`."""
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
        in_parts = is_sum and inbox.size > 2 and num_elements * x.element_size() > inbox.whole_bytes
        num_shared = triton.cdiv(num_elements, inbox.size) if in_parts else num_elements
        operands = x.view(-1)[begin:], out.view(-1)[factor * begin :], num_elements
        meeting = (
            inbox.memory,
            inbox.addresses,
            inbox.opened,
            inbox.clock,
            inbox.num_done,
            *inbox.deadline,
            inbox.shards,
            inbox.shard_bytes,
            inbox.flags,
            inbox.first_rank,
            inbox.rank,
            inbox.size,
            _WIDTH,
            num_elements % ALIGNMENT == 0,
        )
        grid = (min(triton.cdiv(num_shared, _WIDTH), MAX_PROGRAMS),)
        if in_parts:
            sum_in_parts[grid](*operands, *meeting, num_warps=8)
        else:
            exchange_shards[grid](*operands, *meeting, num_columns, is_sum, num_warps=8)


def inbox_bytes(size: int, shard_bytes: int) -> tuple[int, int]:
    """Return the bytes of shards and of flags."""
    return prod((2, size, shard_bytes)), prod((MAX_PROGRAMS, size, 8))
