"""All-reduce and all-gather in one round.

Every rank puts its shard into all inboxes, sets flags, and waits for the others' flags.
"""

import triton
import triton.language as tl

from loong.kernels.exchange.rounds import (
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
def exchange_shards(
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
    epoch, room, deadline = turn_of(clock, shards, shard_bytes, size)
    begin, end = share_of(num_elements, width, is_aligned)
    peers = addresses + first_rank
    await_opened(opened, epoch, first_rank, word, stop, limit, deadline, size)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        values = tl.load(x + element, element < end)
        put_to_all(peers, room + rank * shard_bytes, x.dtype, element, values, element < end, size)
    report_all(peers, flags, rank, epoch, stop, size)
    await_all(program_flags(memory, flags, size), epoch, first_rank, word, stop, limit, deadline, size)
    for start in range(begin, end, width):
        element = start + tl.arange(0, width)
        if is_sum:
            total = sum_here(memory + room, shard_bytes, x.dtype, element, element < end, size)
            tl.store(out + element, total, element < end)
        else:
            for source in tl.static_range(size):
                shard = pointer_to(memory + room + source * shard_bytes, x.dtype)
                values = tl.load(shard + element, element < end, cache_modifier=".cg")
                row, column = element // num_columns, element % num_columns
                place = (row * size + source).to(tl.int64) * num_columns + column
                tl.store(out + place, values, element < end)
    end_turn(clock, num_done, epoch)
