"""All-reduce and all-gather over the ranks of one instance, through memory that all of them write to.

Every rank puts its shard into all inboxes, sets flags, and waits for the others' flags. Then all add the same
numbers in the same order, with bitwise equal results.

A large sum of many ranks takes two rounds instead. Each rank receives its part of all shards, adds these, and
sends the total to all, which takes 2 / size of the bytes. Epochs come from a clock on the device, which each
call advances by two, so a captured call can be replayed in any batch.
"""

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.exchange.signals import EPOCHS, Deadline, await_flag, raise_flag

MAX_PROGRAMS = 128  # of a call: they wait for each other, so all must run at once
_EPOCHS = tl.constexpr(EPOCHS)
_WIDTH = 2048  # elements at once
_PATIENCE = tl.constexpr(1024)  # of all programs but the first
_ALIGNMENT = 16  # elements, and bytes, so that every thread moves 16 bytes at once
_ALIGNED = tl.constexpr(_ALIGNMENT)


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
            num_elements % _ALIGNMENT == 0,
        )
        grid = (min(triton.cdiv(num_shared, _WIDTH), MAX_PROGRAMS),)
        if in_parts:
            _sum_in_parts[grid](*operands, *meeting, num_warps=8)
        else:
            _exchange_shards[grid](*operands, *meeting, num_columns, is_sum, num_warps=8)


def inbox_bytes(size: int, shard_bytes: int) -> tuple[int, int]:
    """Return the bytes of shards and of flags."""
    return prod((2, size, shard_bytes)), prod((MAX_PROGRAMS, size, 8))


@triton.jit(do_not_specialize=["num_elements", "rank", "first_rank", "limit"])
def _exchange_shards(
    x: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
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
    is_aligned: tl.constexpr,
    num_columns: tl.tensor,
    is_sum: tl.constexpr,
) -> None:
    """Send all shards to all ranks, and add them, or concatenate them."""
    epoch, room, deadline = _turn(clock, shards, shard_bytes, size)
    begin, end = _share(num_elements, width, is_aligned)
    peers = addresses + first_rank
    _await_all(opened + first_rank, epoch // _EPOCHS * _EPOCHS, first_rank, word, stop, limit, deadline, size)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        values = tl.load(x + element, element < end)
        _put_to_all(peers, room + rank * shard_bytes, x.dtype, element, values, element < end, size)
    _report_all(peers, flags, rank, epoch, stop, size)
    _await_all(_flags_of_all(memory, flags, size), epoch, first_rank, word, stop, limit, deadline, size)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        if is_sum:
            total = _sum_here(memory + room, shard_bytes, x.dtype, element, element < end, size)
            tl.store(out + element, total, element < end)
        else:
            for source in tl.static_range(size):
                shard = _pointer(memory + room + source * shard_bytes, x.dtype)
                values = tl.load(shard + element, element < end, cache_modifier=".cg")
                row, column = element // num_columns, element % num_columns
                place = (row * size + source).to(tl.int64) * num_columns + column
                tl.store(out + place, values, element < end)
    _end_turn(clock, num_done, epoch)


@triton.jit(do_not_specialize=["num_elements", "rank", "first_rank", "limit"])
def _sum_in_parts(
    x: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
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
    is_aligned: tl.constexpr,
) -> None:
    """Send each rank its part of all shards. Each rank adds them, and puts the total to all."""
    epoch, room, deadline = _turn(clock, shards, shard_bytes, size)
    part = tl.cdiv(tl.cdiv(num_elements, size), _ALIGNED) * _ALIGNED
    begin, end = _share(part, width, True)
    peers, own_slot, flags_of_all = (
        addresses + first_rank,
        room + rank * shard_bytes,
        _flags_of_all(memory, flags, size),
    )
    _await_all(opened + first_rank, epoch // _EPOCHS * _EPOCHS, first_rank, word, stop, limit, deadline, size)
    for peer in tl.static_range(size):
        target = _pointer(tl.load(peers + peer) + own_slot, x.dtype)
        its_end = _end_in(part, peer, end, num_elements, is_aligned)
        for start in range(begin, its_end, width):
            element = start + tl.arange(0, width)
            tl.store(
                target + element, tl.load(x + peer * part + element, element < its_end), element < its_end
            )
    _report_all(peers, flags, rank, epoch, stop, size)
    _await_all(flags_of_all, epoch, first_rank, word, stop, limit, deadline, size)
    own_end = _end_in(part, rank, end, num_elements, is_aligned)
    for start in range(begin, own_end, width):
        element = start + tl.arange(0, width)
        total = _sum_here(memory + room, shard_bytes, x.dtype, element, element < own_end, size)
        _put_to_all(peers, own_slot, x.dtype, part + element, total, element < own_end, size)
    _report_all(peers, flags, rank, epoch + 1, stop, size)
    _await_all(flags_of_all, epoch + 1, first_rank, word, stop, limit, deadline, size)
    for source in tl.static_range(size):
        came = _pointer(memory + room + source * shard_bytes, x.dtype) + part
        its_end = _end_in(part, source, end, num_elements, is_aligned)
        for start in range(begin, its_end, width):
            element = start + tl.arange(0, width)
            total = tl.load(came + element, element < its_end, cache_modifier=".cg")
            tl.store(out + source * part + element, total, element < its_end)
    _end_turn(clock, num_done, epoch)


@triton.jit
def _turn(
    clock: tl.tensor, shards: tl.tensor, shard_bytes: tl.tensor, size: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the epoch of this call, its space, and the deadline of this program."""
    epoch = tl.load(clock) + 1
    room = shards + epoch // 2 % 2 * size * shard_bytes
    return epoch, room, tl.where(tl.program_id(0) == 0, 1, _PATIENCE)


@triton.jit
def _end_turn(clock: tl.tensor, num_done: tl.tensor, epoch: tl.tensor) -> None:
    if tl.atomic_add(num_done, 1) == tl.num_programs(0) - 1:  # all have read the clock
        tl.store(num_done, 0)
        tl.store(clock, epoch + 1)


@triton.jit
def _share(
    num_elements: tl.tensor, width: tl.constexpr, is_aligned: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the range of elements of this program."""
    share = tl.cdiv(num_elements, tl.num_programs(0) * width) * width
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, num_elements)
    return begin, tl.multiple_of(end, _ALIGNED) if is_aligned else end


@triton.jit
def _end_in(
    part: tl.tensor, rank: tl.tensor, end: tl.tensor, num_elements: tl.tensor, is_aligned: tl.constexpr
) -> tl.tensor:
    """Return the end of a program's elements in the part of one rank. The last parts are shorter."""
    end = tl.minimum(end, num_elements - rank * part)
    return tl.multiple_of(end, _ALIGNED) if is_aligned else end


@triton.jit
def _pointer(address: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Return a pointer to elements that are aligned to 16 bytes."""
    return tl.multiple_of(address.to(kind), _ALIGNED)


@triton.jit
def _flags_of_all(memory: tl.tensor, flags: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return this program's flags [size]."""
    return (memory + flags).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * size


@triton.jit
def _report_all(
    peers: tl.tensor,
    flags: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    stop: tl.tensor,
    size: tl.constexpr,
) -> None:
    for peer in tl.static_range(size):
        raise_flag(tl.load(peers + peer) + flags + (tl.program_id(0) * size + rank) * 8, epoch, stop)


@triton.jit
def _await_all(
    flags: tl.tensor,
    epoch: tl.tensor,
    first_rank: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    deadline: tl.tensor,
    size: tl.constexpr,
) -> None:
    for source in tl.static_range(size):
        await_flag(flags + source, epoch, first_rank + source, word, stop, limit, deadline)


@triton.jit
def _put_to_all(
    peers: tl.tensor,
    offset: tl.tensor,
    kind: tl.constexpr,
    element: tl.tensor,
    values: tl.tensor,
    is_element: tl.tensor,
    size: tl.constexpr,
) -> None:
    for peer in tl.static_range(size):
        tl.store(_pointer(tl.load(peers + peer) + offset, kind) + element, values, is_element)


@triton.jit
def _sum_here(
    shards: tl.tensor,
    shard_bytes: tl.tensor,
    kind: tl.constexpr,
    element: tl.tensor,
    is_element: tl.tensor,
    size: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the elements of all received shards, in the order of ranks."""
    total = tl.zeros(element.shape, tl.float32)
    for source in tl.static_range(size):
        shard = _pointer(shards + source * shard_bytes, kind)
        total += tl.load(shard + element, is_element, 0.0, cache_modifier=".cg").to(tl.float32)
    return total.to(kind.element_ty)
