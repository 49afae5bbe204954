"""The exchanges of a captured layer, by puts into the memory of the group's members.

Every member has the same `Mailbox` at the same place of its memory. First, each master puts the queries of
its tokens into all mailboxes, and every member waits for all queries. Then each member puts its attention of
a master's queries into that master's mailbox, and masters merge. The members and their numbers of tokens are
data in device memory, so that one captured graph serves any group.

One mailbox is enough for all layers and steps. Memory is written by one sender only, and is read before the
sender writes it again. A sender puts its next queries after it has merged all members' partials of the last
ones. It puts its next partials for a master after that master's next queries have arrived, which the master
puts after merging the last partials. So each exchange gives the credit for the other one, and a step may use
another layout than the step before.

If keys and values travel instead, nothing is sent back. The rows of every member are put into the two halves
of a mailbox in turn. A member that puts the rows of a layer has received all rows of the layer before. Their
senders had read the half of the layer before that. This holds within a step. A batch has one such step, and
begins on the device once all its members have ended their last batch (`await_members`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.attention.softmax import join_pair
from loong.kernels.contract import Dims
from loong.kernels.exchange.signals import EPOCHS, Deadline, set_flag
from loong.kernels.exchange.waits import await_flags, watch_chunks, watch_flags
from loong.kernels.partial import Partial

_MAX_CHUNKS = 32  # programs that put to one member
_NUM_WARPS = 8
_EPOCHS = tl.constexpr(EPOCHS)
_LINE = 16  # words between flags, so that many polls do not delay writes


class Peers(NamedTuple):
    """The members of a step, in the order of instances, in device memory."""

    addresses: Tensor  # [N] int64: address of each member's memory on this device; 0: no member
    num_tokens: Tensor  # [N] int64: tokens of each master; 0: no member
    ranks: Tensor  # [N] int64: rank of each, for errors
    epoch: Tensor  # [1] int64: epoch of the step's layer 0


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Space for the exchanges of up to T tokens a master, of N instances, in memory that peers can write.

    Chunk c of a put has the tokens c, c + C, c + 2 C and so on. Each chunk has a flag.
    """

    memory: Tensor  # [num_bytes] uint8: the whole memory; offsets are equal on every member
    queries: Tensor  # [N, T, H, D], by sender
    parts: Partial  # out [N, T, H, D] of the queries' dtype, lse [N, T, H] float32, by sender
    query_flags: Tensor  # [N, C, 16] int64, by sender; the first of each line is the flag
    part_flags: Tensor  # [N, C, 16] int64, as query_flags

    @classmethod
    def laid(
        cls,
        memory: Tensor,
        reserve: Callable[[int], int],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        max_num_chunks: int = _MAX_CHUNKS,
    ) -> "Mailbox":
        """Return a mailbox of shape (N, T, H, D) in `memory`.

        `reserve` returns the offset of a number of zero bytes there, aligned to 16, equal on every member.
        """

        def take(dtype: torch.dtype, *sizes: int) -> Tensor:
            num_bytes = prod(sizes) * dtype.itemsize
            offset = reserve(num_bytes)
            return memory[offset : offset + num_bytes].view(dtype).view(sizes)

        num_instances, num_tokens, num_heads, _ = shape
        num_chunks = min(num_tokens, max_num_chunks)
        return cls(
            memory=memory,
            queries=take(dtype, *shape),
            parts=Partial(take(dtype, *shape), take(torch.float32, num_instances, num_tokens, num_heads)),
            query_flags=take(torch.int64, num_instances, num_chunks, _LINE),
            part_flags=take(torch.int64, num_instances, num_chunks, _LINE),
        )

    def for_fewer(self, num_tokens: int) -> "Mailbox":
        """Return the same memory for up to `num_tokens` a master.

        Steps may use either, one after the other.
        """
        queries, (out, lse) = self.queries, self.parts
        num_instances = len(queries)

        def first(rows: Tensor) -> Tensor:
            flat = rows.flatten(0, 1)[: num_instances * num_tokens]
            return flat.view(num_instances, num_tokens, *rows.shape[2:])

        return replace(self, queries=first(queries), parts=Partial(first(out), first(lse)))

    def halves(self, rows: Tensor) -> "tuple[Mailbox, Mailbox]":
        """Return the spaces for queries and for partials, each as one for KV like rows [T, ...], by instance.

        `queries` are then KV [N, T, 1, R] of rows with R elements. Raises `ValueError` beyond `max_kv_rows`.
        """
        row_bytes = rows[0].nbytes
        if len(rows) > self.max_kv_rows(row_bytes):
            raise ValueError(f"a mailbox has room for {self.max_kv_rows(row_bytes)} rows, not {len(rows)}")
        shape = (len(self.queries), len(rows), 1, rows[0].numel())
        first, second = (
            replace(self, queries=room.view(-1).view(rows.dtype)[: prod(shape)].view(shape))
            for room in (self.queries, self.parts.out)
        )
        return first, second

    def max_kv_rows(self, row_bytes: int) -> int:
        """Return the number of tokens an instance whose KV, in rows of `row_bytes`, fits each half."""
        return self.queries[0].nbytes // row_bytes

    def offset(self, tensor: Tensor) -> int:
        """Return the offset of a tensor of this mailbox, in bytes."""
        return tensor.data_ptr() - self.memory.data_ptr()


def await_members(opened: Tensor, peers: Peers, deadline: Deadline) -> None:
    """Make the stream wait until the flags of all members show that they are in the batch of `peers.epoch`.

    Contract:
        opened [N] int64, of any stride: a flag in this process's memory for each instance.
    """
    dims = Dims()
    dims.bind("opened", opened, "N", torch.int64, is_contiguous=False)
    dims.bind("peers.addresses", peers.addresses, "N", torch.int64)
    _await_members[(1,)](
        opened,
        peers.addresses,
        peers.ranks,
        peers.epoch,
        *deadline,
        opened.stride(0),
        num_instances=dims["N"],
        members_room=triton.next_power_of_2(dims["N"]),
        num_warps=1,
    )


def exchange_queries(
    q: Tensor, mailbox: Mailbox, peers: Peers, deadline: Deadline, *, instance: int, layer: int
) -> None:
    """Put q to every member, and make the stream wait for the queries of all members.

    Contract:
        q [T, H, D], contiguous, of the mailbox's shape; rows from num_tokens[instance] on are left out.
        instance: the index of this instance among the N.
        Called for growing epochs, in turn with `exchange_partials`, or on the two `halves`, where each member
            has at least one row. `mailbox.queries` is valid until partials, or the second next rows, are
            exchanged. Allocates nothing.
    """
    dims = _check(mailbox, peers, deadline)
    dims.bind("q", q, "T H D", mailbox.queries.dtype)
    row_size = dims["H"] * dims["D"]
    _exchange_queries[(dims["N"] * dims["C"] + 1,)](
        q,
        *peers,
        mailbox.query_flags,
        *deadline,
        mailbox.offset(mailbox.queries),
        mailbox.offset(mailbox.query_flags),
        instance,
        layer,
        num_instances=dims["N"],
        num_tokens_room=dims["T"],
        num_chunks=dims["C"],
        line=_LINE,
        flags_room=triton.next_power_of_2(dims["N"] * dims["C"]),
        row_size=row_size,
        width=min(triton.next_power_of_2(row_size), 4096),
        num_warps=_NUM_WARPS,
    )


def exchange_partials(
    part: Partial,
    mailbox: Mailbox,
    peers: Peers,
    deadline: Deadline,
    *,
    instance: int,
    layer: int,
    out: Tensor,
) -> None:
    """Put to every master the attention of its queries, and merge that of the own ones into `out`.

    Contract:
        part: attention of `mailbox.queries` over the KV of this instance, out [N, T, H, D] of their dtype and
            lse [N, T, H] float32. Where lse is -inf, out is not sent.
        out [T, H, D] of that dtype; rows from num_tokens[instance] on become 0. Partials are merged in
            float32, in the order of instances.
        Otherwise as `exchange_queries`.
    """
    dims = _check(mailbox, peers, deadline)
    dims.bind("part.out", part.out, "N T H D", mailbox.parts.out.dtype)
    dims.bind("part.lse", part.lse, "N T H", torch.float32)
    dims.bind("out", out, "T H D", mailbox.parts.out.dtype)
    _exchange_partials[(dims["N"] * dims["C"] + 1 + dims["T"],)](
        *part,
        out,
        *peers,
        *mailbox.parts,
        mailbox.part_flags,
        *deadline,
        mailbox.offset(mailbox.parts.out),
        mailbox.offset(mailbox.parts.lse),
        mailbox.offset(mailbox.part_flags),
        instance,
        layer,
        num_instances=dims["N"],
        num_tokens_room=dims["T"],
        num_chunks=dims["C"],
        line=_LINE,
        members_room=triton.next_power_of_2(dims["N"]),
        flags_room=triton.next_power_of_2(dims["N"] * dims["C"]),
        num_heads=dims["H"],
        heads_room=triton.next_power_of_2(dims["H"]),
        head_dim=dims["D"],
        width=triton.next_power_of_2(dims["D"]),
        num_warps=_NUM_WARPS,
    )


def _check(mailbox: Mailbox, peers: Peers, deadline: Deadline) -> Dims:
    dims = Dims()
    dims.bind("mailbox.queries", mailbox.queries, "N T H D")
    dims.bind("mailbox.query_flags", mailbox.query_flags, "N C L", torch.int64)
    dims.bind("peers.addresses", peers.addresses, "N", torch.int64)
    dims.bind("peers.num_tokens", peers.num_tokens, "N", torch.int64)
    dims.bind("peers.ranks", peers.ranks, "N", torch.int64)
    dims.bind("peers.epoch", peers.epoch, "1", torch.int64)
    dims.bind("deadline.word", deadline.word, "2", torch.int64)
    return dims


@triton.jit
def _await_members(
    opened: tl.tensor,
    addresses: tl.tensor,
    ranks: tl.tensor,
    epoch: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    stride: tl.tensor,
    num_instances: tl.constexpr,
    members_room: tl.constexpr,
) -> None:
    member = tl.arange(0, members_room)
    is_awaited = tl.load(addresses + member, member < num_instances, 0) != 0
    flags = opened + tl.where(is_awaited, member, 0) * stride
    rank = tl.load(ranks + member, is_awaited, 0)
    first = tl.load(epoch) // _EPOCHS * _EPOCHS
    watch_flags(flags, is_awaited, rank, first, word, stop, limit)


@triton.jit(do_not_specialize=["layer", "instance", "num_tokens_room"])
def _exchange_queries(
    q: tl.tensor,
    addresses: tl.tensor,
    num_tokens: tl.tensor,
    ranks: tl.tensor,
    epoch: tl.tensor,
    flags: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    queries_offset: tl.tensor,
    flags_offset: tl.tensor,
    instance: tl.tensor,
    layer: tl.tensor,
    num_instances: tl.constexpr,
    num_tokens_room: tl.tensor,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    flags_room: tl.constexpr,
    row_size: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Put one chunk to one member by each program. The last program waits."""
    program = tl.program_id(0)
    due = tl.load(epoch) + layer
    if program < num_instances * num_chunks:
        chunk, count = program % num_chunks, tl.load(num_tokens + instance)
        address = tl.load(addresses + program // num_chunks)
        if (address != 0) & (chunk < count) & (tl.load(stop, volatile=True) < due):
            target = tl.multiple_of((address + queries_offset).to(q.dtype), 16)
            for token in range(chunk, count, num_chunks):
                target_row = target + (instance * num_tokens_room + token).to(tl.int64) * row_size
                for start in tl.static_range(0, row_size, width):
                    column = start + tl.arange(0, width)
                    values = tl.load(q + token * row_size + column, column < row_size)
                    tl.store(target_row + column, values, column < row_size)
            set_flag(address + flags_offset + (instance * num_chunks + chunk) * 8 * line, due)
    else:
        watch_chunks(
            flags, ranks, num_tokens, due, word, stop, limit, num_instances, num_chunks, line, flags_room
        )


@triton.jit(do_not_specialize=["layer", "instance", "num_tokens_room"])
def _exchange_partials(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    num_tokens: tl.tensor,
    ranks: tl.tensor,
    epoch: tl.tensor,
    came_out: tl.tensor,
    came_lse: tl.tensor,
    flags: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    out_offset: tl.tensor,
    lse_offset: tl.tensor,
    flags_offset: tl.tensor,
    instance: tl.tensor,
    layer: tl.tensor,
    num_instances: tl.constexpr,
    num_tokens_room: tl.tensor,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    members_room: tl.constexpr,
    flags_room: tl.constexpr,
    num_heads: tl.constexpr,
    heads_room: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Put one chunk to one master by each program. Later programs wait for puts, and merge one token each.

    The program between them polls the host's memory for all waiting ones, because that is slow.
    """
    program, num_puts = tl.program_id(0), num_instances * num_chunks
    due = tl.load(epoch) + layer
    head, dim = tl.arange(0, heads_room), tl.arange(0, width)
    is_head = head < num_heads
    element = head[:, None] * head_dim + dim[None, :]
    is_dim = (dim < head_dim)[None, :]
    if program < num_puts:
        master, chunk = program // num_chunks, program % num_chunks
        address, count = tl.load(addresses + master), tl.load(num_tokens + master)
        if (chunk < count) & (tl.load(stop, volatile=True) < due):
            target_out = tl.multiple_of((address + out_offset).to(part_out.dtype), 16)
            target_lse = tl.multiple_of((address + lse_offset).to(part_lse.dtype), 16)
            for token in range(chunk, count, num_chunks):
                row = (master * num_tokens_room + token).to(tl.int64) * num_heads
                target_row = (instance * num_tokens_room + token).to(tl.int64) * num_heads
                lse = tl.load(part_lse + row + head, is_head, float("-inf"))
                values = tl.load(part_out + row * head_dim + element, is_head[:, None] & is_dim)
                is_seen = (lse > float("-inf"))[:, None] & is_dim
                tl.store(target_out + target_row * head_dim + element, values, is_seen)
                tl.store(target_lse + target_row + head, lse, is_head)
            set_flag(address + flags_offset + (instance * num_chunks + chunk) * 8 * line, due)
    elif program == num_puts:
        flag = tl.arange(0, flags_room)
        sender = flag // num_chunks
        is_member = tl.load(addresses + sender, sender < num_instances, 0) != 0
        is_awaited = is_member & (flag % num_chunks < tl.load(num_tokens + instance))
        rank = tl.load(ranks + sender, is_awaited, 0)
        watch_flags(flags + tl.where(is_awaited, flag, 0) * line, is_awaited, rank, due, word, stop, limit)
    else:
        token = program - num_puts - 1
        total = tl.zeros([heads_room, width], tl.float32)
        total_lse = tl.full([heads_room], float("-inf"), tl.float32)
        if token < tl.load(num_tokens + instance):
            member = tl.arange(0, members_room)
            is_late = tl.load(addresses + member, member < num_instances, 0) != 0
            its_flag = member * num_chunks + token % num_chunks
            await_flags(flags + tl.where(is_late, its_flag, 0) * line, is_late, due, stop)
            for source in tl.static_range(num_instances):
                is_there = is_head & (tl.load(addresses + source) != 0)
                came = (source * num_tokens_room + token).to(tl.int64) * num_heads
                lse = tl.load(came_lse + came + head, is_there, float("-inf"), cache_modifier=".cg")
                is_value = is_there[:, None] & is_dim
                values = tl.load(came_out + came * head_dim + element, is_value, 0.0, cache_modifier=".cg")
                values = tl.where((lse > float("-inf"))[:, None], values.to(tl.float32), 0.0)
                total, total_lse = join_pair(total, total_lse, values, lse)
        place = out + token.to(tl.int64) * num_heads * head_dim
        tl.store(place + element, total.to(out.dtype.element_ty), is_head[:, None] & is_dim)
