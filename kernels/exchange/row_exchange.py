"""The two exchanges of a layer in a step that the host launches: any rows to any peers.

Like the exchanges of a decode step (`loong.kernels.exchange.mailbox`), they put into the mailboxes of peers,
with the same credit: a sender's memory is read before that sender writes again. But an instance sends a peer
only the rows whose KV that peer has, and receives other rows. So the puts follow tables, which are made once
a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.attention.softmax import join_pair
from loong.kernels.contract import Dims
from loong.kernels.exchange.mailbox import Mailbox
from loong.kernels.exchange.signals import Deadline, set_flag
from loong.kernels.exchange.waits import await_flags, watch_chunks
from loong.kernels.launch import Launcher
from loong.kernels.partial import Partial

_NUM_WARPS = 8
_MAX_WIDTH = 4096  # elements of a row at once
_LETTERS = {"rows": "R", "merged_rows": "M", "places": "M N", "epoch": "1"}  # of `RowPeers`; others: N


class RowPeers(NamedTuple):
    """The rows that travel in a step, in the order of instances, in device memory, int64."""

    addresses: Tensor  # [N]: address of each one's memory on this device
    ranks: Tensor  # [N]: rank of each, for errors
    num_sent_rows: Tensor  # [N]: rows of this instance that each peer receives
    num_peer_rows: Tensor  # [N]: rows that each peer sends here
    sent_from: Tensor  # [N]: index in `rows` of the first row for each peer
    served_from: Tensor  # [N]: index of the first partial for each peer
    rows: Tensor  # [sum of num_sent_rows]: of the step, peer by peer
    merged_rows: Tensor  # [M]: all rows of the step that any peer receives, each once
    places: Tensor  # [M, N]: index of each of these among a peer's rows; -1: none
    epoch: Tensor  # [1]: epoch of the step's layer 0


class RowExchange:
    """The exchanges of a step. In each layer `put`, `wait` and `send_partials` are called once each, in this
    order.

    Contract:
        No peer receives more rows than the mailbox holds, and rows are within those of the step (not
            checked). All peers have opened the batch. `instance` is the index of this one among the N. Layers
            count from `peers.epoch`, the same on all members. Only the constructor allocates.
    """

    def __init__(self, mailbox: Mailbox, peers: RowPeers, deadline: Deadline, instance: int) -> None:
        dims = Dims()
        dims.bind("mailbox.queries", mailbox.queries, "N T H D")
        dims.bind("mailbox.query_flags", mailbox.query_flags, "N C L", torch.int64)
        for name, table in zip(RowPeers._fields, peers, strict=True):
            dims.bind(f"peers.{name}", table, _LETTERS.get(name, "N"), torch.int64)
        dims.bind("deadline.word", deadline.word, "2", torch.int64)
        self._mailbox, self._peers, self._deadline, self._instance = mailbox, peers, deadline, instance
        self._num_puts, self._num_merged = dims["N"] * dims["C"], dims["M"]
        self._rooms = {letter: triton.next_power_of_2(dims[letter]) for letter in "NHD"}
        self._flags_room = triton.next_power_of_2(self._num_puts)
        self._dims = dims

    def put(self, q: Tensor, layer: int) -> None:
        """Put rows of q to the peers that receive them. The stream does not wait for the peers' rows.

        Contract:
            q [A, H, D], contiguous, of the mailbox's dtype.
        """
        dims, mailbox, peers = self._dims, self._mailbox, self._peers
        Dims().bind("q", q, f"A {dims['H']} {dims['D']}", mailbox.queries.dtype)
        row_size = dims["H"] * dims["D"]
        _put(
            self._num_puts,
            q,
            peers.rows,
            peers.addresses,
            peers.num_sent_rows,
            peers.sent_from,
            peers.epoch,
            self._deadline.stop,
            mailbox.offset(mailbox.queries),
            mailbox.offset(mailbox.query_flags),
            self._instance,
            layer,
            constants=(
                dims["T"],
                dims["C"],
                dims["L"],
                row_size,
                min(self._rooms["H"] * self._rooms["D"], _MAX_WIDTH),
            ),
        )

    def wait(self, layer: int) -> None:
        """Make the stream wait for all rows that peers send.

        `mailbox.queries[peer]` is valid until their partials are sent.
        """
        dims, peers = self._dims, self._peers
        _await(
            1,
            self._mailbox.query_flags,
            peers.ranks,
            peers.num_peer_rows,
            peers.epoch,
            *self._deadline,
            layer,
            constants=(dims["N"], dims["C"], dims["L"], self._flags_room),
        )

    def send_partials(self, part: Partial, total: Partial, layer: int) -> None:
        """Put to every peer the attention of its rows, and merge the peers' partials into `total`.

        Contract:
            part: attention of the received rows, peer by peer: out [S, H, D] of float32 or the mailbox's
            dtype, in
                which it travels, and lse [S, H] float32. Where lse is -inf, out may be uninitialized.
            total: out [A, H, D] and lse [A, H] of this instance's rows, float32; changed. Where lse is -inf,
            out may
                be uninitialized. Partials are merged in float32, in the order of instances.
        """
        dims, mailbox, peers = self._dims, self._mailbox, self._peers
        heads = f"{dims['H']} {dims['D']}"
        Dims().bind("part.out", part.out, f"S {heads}")
        Dims().bind("total.out", total.out, f"A {heads}", torch.float32)
        _answer(
            self._num_puts + 1 + self._num_merged,
            *part,
            *total,
            peers.addresses,
            peers.ranks,
            peers.num_sent_rows,
            peers.num_peer_rows,
            peers.served_from,
            peers.merged_rows,
            peers.places,
            peers.epoch,
            *mailbox.parts,
            mailbox.part_flags,
            *self._deadline,
            mailbox.offset(mailbox.parts.out),
            mailbox.offset(mailbox.parts.lse),
            mailbox.offset(mailbox.part_flags),
            self._instance,
            layer,
            constants=(
                *(dims[letter] for letter in "NTCLHD"),
                self._rooms["N"],
                self._flags_room,
                self._rooms["H"],
                self._rooms["D"],
            ),
        )


@triton.jit(do_not_specialize=["queries_offset", "flags_offset", "layer", "instance"])
def _put_queries(
    q: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    num_sent_rows: tl.tensor,
    sent_from: tl.tensor,
    epoch: tl.tensor,
    stop: tl.tensor,
    queries_offset: tl.tensor,
    flags_offset: tl.tensor,
    instance: tl.tensor,
    layer: tl.tensor,
    num_rows_room: tl.constexpr,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    row_size: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Put one chunk to one peer by each program."""
    peer, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    due = tl.load(epoch) + layer
    count = tl.load(num_sent_rows + peer)
    if (chunk < count) & (tl.load(stop, volatile=True) < due):
        address = tl.load(addresses + peer)
        target = tl.multiple_of((address + queries_offset).to(q.dtype), 16)
        peer_rows = rows + tl.load(sent_from + peer)
        for place in range(chunk, count, num_chunks):
            row = q + tl.load(peer_rows + place) * row_size
            target_row = target + (instance * num_rows_room + place).to(tl.int64) * row_size
            for start in tl.static_range(0, row_size, width):
                column = start + tl.arange(0, width)
                values = tl.load(row + column, column < row_size)
                tl.store(target_row + column, values, column < row_size)
        set_flag(address + flags_offset + (instance * num_chunks + chunk) * 8 * line, due)


@triton.jit(do_not_specialize=["limit", "layer"])
def _await_queries(
    flags: tl.tensor,
    ranks: tl.tensor,
    num_peer_rows: tl.tensor,
    epoch: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    layer: tl.tensor,
    num_instances: tl.constexpr,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    flags_room: tl.constexpr,
) -> None:
    due = tl.load(epoch) + layer
    watch_chunks(
        flags, ranks, num_peer_rows, due, word, stop, limit, num_instances, num_chunks, line, flags_room
    )


@triton.jit(do_not_specialize=["limit", "out_offset", "lse_offset", "flags_offset", "layer", "instance"])
def _attend_peer_queries(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    total_out: tl.tensor,
    total_lse: tl.tensor,
    addresses: tl.tensor,
    ranks: tl.tensor,
    num_sent_rows: tl.tensor,
    num_peer_rows: tl.tensor,
    served_from: tl.tensor,
    merged_rows: tl.tensor,
    places: tl.tensor,
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
    num_rows_room: tl.constexpr,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    members_room: tl.constexpr,
    flags_room: tl.constexpr,
    heads_room: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Put one chunk to one peer by each program. Later programs wait for puts, and merge one row each.

    The program between them polls the host's memory for all waiting ones, because that is slow.
    """
    program, num_puts = tl.program_id(0), num_instances * num_chunks
    due = tl.load(epoch) + layer
    head, dim = tl.arange(0, heads_room), tl.arange(0, width)
    is_head = head < num_heads
    element = head[:, None] * head_dim + dim[None, :]
    is_element = is_head[:, None] & (dim < head_dim)[None, :]
    if program < num_puts:
        peer, chunk = program // num_chunks, program % num_chunks
        count = tl.load(num_peer_rows + peer)
        if (chunk < count) & (tl.load(stop, volatile=True) < due):
            address, first = tl.load(addresses + peer), tl.load(served_from + peer)
            target_out = tl.multiple_of((address + out_offset).to(came_out.dtype), 16)
            target_lse = tl.multiple_of((address + lse_offset).to(came_lse.dtype), 16)
            for place in range(chunk, count, num_chunks):
                row = (first + place) * num_heads
                target_row = (instance * num_rows_room + place).to(tl.int64) * num_heads
                lse = tl.load(part_lse + row + head, is_head, float("-inf"))
                is_seen = is_element & (lse > float("-inf"))[:, None]
                values = tl.load(part_out + row * head_dim + element, is_seen, 0.0)
                values = values.to(came_out.dtype.element_ty)
                tl.store(target_out + target_row * head_dim + element, values, is_seen)
                tl.store(target_lse + target_row + head, lse, is_head)
            set_flag(address + flags_offset + (instance * num_chunks + chunk) * 8 * line, due)
    elif program == num_puts:
        watch_chunks(
            flags, ranks, num_sent_rows, due, word, stop, limit, num_instances, num_chunks, line, flags_room
        )
    else:
        merged = (program - num_puts - 1).to(tl.int64)
        peer_places = places + merged * num_instances
        member = tl.arange(0, members_room)
        place = tl.load(peer_places + member, member < num_instances, -1)
        its_flag = member * num_chunks + place % num_chunks
        await_flags(flags + tl.where(place >= 0, its_flag, 0) * line, place >= 0, due, stop)
        row = tl.load(merged_rows + merged) * num_heads
        total = tl.load(total_lse + row + head, is_head, float("-inf"))
        elements = total_out + row * head_dim + element
        out = tl.load(elements, is_element & (total > float("-inf"))[:, None], 0.0)
        for source in tl.static_range(num_instances):
            its_place = tl.load(peer_places + source)
            is_there = is_head & (its_place >= 0)
            came = (source * num_rows_room + its_place) * num_heads
            lse = tl.load(came_lse + came + head, is_there, float("-inf"), cache_modifier=".cg")
            is_seen = is_element & (lse > float("-inf"))[:, None]
            values = tl.load(came_out + came * head_dim + element, is_seen, 0.0, cache_modifier=".cg")
            out, total = join_pair(out, total, values.to(tl.float32), lse)
        tl.store(elements, out, is_element)
        tl.store(total_lse + row + head, total, is_head)


_put = Launcher(_put_queries, num_warps=_NUM_WARPS)
_await = Launcher(_await_queries, num_warps=_NUM_WARPS)
_answer = Launcher(_attend_peer_queries, num_warps=_NUM_WARPS)
