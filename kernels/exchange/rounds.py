"""The steps of all-reduce and all-gather: turns, shares of programs, puts, flags and waits."""

import triton
import triton.language as tl

from loong.kernels.exchange.signals import EPOCHS, await_flag, raise_flag

ALIGNMENT = 16  # elements, and bytes, so that every thread moves 16 bytes at once
ALIGNED = tl.constexpr(ALIGNMENT)
_EPOCHS = tl.constexpr(EPOCHS)
_PATIENCE = tl.constexpr(1024)  # of all programs but the first


@triton.jit
def turn_of(
    clock: tl.tensor, shards: tl.tensor, shard_bytes: tl.tensor, size: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the epoch of this call, its space, and the deadline of this program."""
    epoch = tl.load(clock) + 1
    room = shards + epoch // 2 % 2 * size * shard_bytes
    return epoch, room, tl.where(tl.program_id(0) == 0, 1, _PATIENCE)


@triton.jit
def end_turn(clock: tl.tensor, num_done: tl.tensor, epoch: tl.tensor) -> None:
    """Advance the clock once the last program has ended."""
    if tl.atomic_add(num_done, 1) == tl.num_programs(0) - 1:  # all have read the clock
        tl.store(num_done, 0)
        tl.store(clock, epoch + 1)


@triton.jit
def share_of(
    num_elements: tl.tensor, width: tl.constexpr, is_aligned: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the range of elements of this program."""
    share = tl.cdiv(num_elements, tl.num_programs(0) * width) * width
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, num_elements)
    return begin, tl.multiple_of(end, ALIGNED) if is_aligned else end


@triton.jit
def pointer_to(address: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Return a pointer to elements that are aligned to 16 bytes."""
    return tl.multiple_of(address.to(kind), ALIGNED)


@triton.jit
def program_flags(memory: tl.tensor, flags: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return this program's flags [size]."""
    return (memory + flags).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * size


@triton.jit
def report_all(
    peers: tl.tensor,
    flags: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    stop: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Set this program's flag of this rank on all ranks."""
    for peer in tl.static_range(size):
        raise_flag(tl.load(peers + peer) + flags + (tl.program_id(0) * size + rank) * 8, epoch, stop)


@triton.jit
def await_all(
    flags: tl.tensor,
    epoch: tl.tensor,
    first_rank: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    deadline: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Wait until the flags [size] of all ranks have this epoch."""
    for source in tl.static_range(size):
        await_flag(flags + source, epoch, first_rank + source, word, stop, limit, deadline)


@triton.jit
def await_opened(
    opened: tl.tensor,
    epoch: tl.tensor,
    first_rank: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    deadline: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Wait until the batch of this epoch has begun on all ranks."""
    await_all(opened + first_rank, epoch // _EPOCHS * _EPOCHS, first_rank, word, stop, limit, deadline, size)


@triton.jit
def put_to_all(
    peers: tl.tensor,
    offset: tl.tensor,
    kind: tl.constexpr,
    element: tl.tensor,
    values: tl.tensor,
    is_element: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Store elements at an offset of the memory of all ranks."""
    for peer in tl.static_range(size):
        tl.store(pointer_to(tl.load(peers + peer) + offset, kind) + element, values, is_element)


@triton.jit
def sum_here(
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
        shard = pointer_to(shards + source * shard_bytes, kind)
        total += tl.load(shard + element, is_element, 0.0, cache_modifier=".cg").to(tl.float32)
    return total.to(kind.element_ty)
