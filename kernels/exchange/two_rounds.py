"""All-reduce in two rounds, which take 2 / size of the bytes of one.

Each rank receives its part of all shards, adds these, and sends the total to all.
"""

import triton
import triton.language as tl

from loong.kernels.exchange.rounds import (
    ALIGNED,
    await_all,
    await_opened,
    end_turn,
    pointer_to,
    program_flags,
    put_to_all,
    report_all,
    share_of,
    sum_here,
    turn_of,
)


@triton.jit(do_not_specialize=["num_elements", "rank", "first_rank", "limit"])
def sum_in_parts(
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
    epoch, room, deadline = turn_of(clock, shards, shard_bytes, size)
    part = tl.cdiv(tl.cdiv(num_elements, size), ALIGNED) * ALIGNED
    begin, end = share_of(part, width, True)
    peers, own_slot, flags_of_all = (
        addresses + first_rank,
        room + rank * shard_bytes,
        program_flags(memory, flags, size),
    )
    await_opened(opened, epoch, first_rank, word, stop, limit, deadline, size)
    for peer in tl.static_range(size):
        target = pointer_to(tl.load(peers + peer) + own_slot, x.dtype)
        its_end = _end_in(part, peer, end, num_elements, is_aligned)
        for start in range(begin, its_end, width):
            element = start + tl.arange(0, width)
            tl.store(
                target + element, tl.load(x + peer * part + element, element < its_end), element < its_end
            )
    report_all(peers, flags, rank, epoch, stop, size)
    await_all(flags_of_all, epoch, first_rank, word, stop, limit, deadline, size)
    own_end = _end_in(part, rank, end, num_elements, is_aligned)
    for start in range(begin, own_end, width):
        element = start + tl.arange(0, width)
        total = sum_here(memory + room, shard_bytes, x.dtype, element, element < own_end, size)
        put_to_all(peers, own_slot, x.dtype, part + element, total, element < own_end, size)
    report_all(peers, flags, rank, epoch + 1, stop, size)
    await_all(flags_of_all, epoch + 1, first_rank, word, stop, limit, deadline, size)
    for source in tl.static_range(size):
        came = pointer_to(memory + room + source * shard_bytes, x.dtype) + part
        its_end = _end_in(part, source, end, num_elements, is_aligned)
        for start in range(begin, its_end, width):
            element = start + tl.arange(0, width)
            total = tl.load(came + element, element < its_end, cache_modifier=".cg")
            tl.store(out + source * part + element, total, element < its_end)
    end_turn(clock, num_done, epoch)


@triton.jit
def _end_in(
    part: tl.tensor, rank: tl.tensor, end: tl.tensor, num_elements: tl.tensor, is_aligned: tl.constexpr
) -> tl.tensor:
    """Return the end of a program's elements in the part of one rank. The last parts are shorter."""
    end = tl.minimum(end, num_elements - rank * part)
    return tl.multiple_of(end, ALIGNED) if is_aligned else end
