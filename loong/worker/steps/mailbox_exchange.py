"""Exchanges of captured steps by puts of the device itself, which a graph repeats without the host."""

from collections.abc import Collection, Mapping
from copy import copy

import torch
from torch import Tensor

from loong.core.cost.cuda_graph_limits import RING_ROOM
from loong.core.placement import InstanceId
from loong.fabric.lanes import LEASE_LANES, Lane
from loong.fabric.memory.arena import Arena
from loong.kernels import Partial
from loong.kernels.exchange.mailbox import Mailbox, Peers, await_members, exchange_partials, exchange_queries
from loong.model.device import Device
from loong.model.tensor_parallel import Shard
from loong.worker.steps.decode_state import GROUP_SIZES
from loong.worker.steps.mixed_inputs import GROUP_STEP_SIZES, MAX_ROWS
from loong.worker.steps.ring_inputs import MAX_KV_ROOM

QUERY_ROOM = RING_ROOM * MAX_ROWS  # queries of the largest mailbox, whose halves also hold KV
_NUM_CHUNKS, _MORE_CHUNKS = 32, 64  # programs that put to a member, more of them for many rows


class MailboxExchange:
    """Exchanges over an arena, with a mailbox in it for every size of a step. See KVExchange.

    An exchange's epoch is that of its step and layer; it grows by the number of layers with each step. A
    holder is a member without tokens. It has a clock and a deadline for each lease that it serves, and the
    same mailboxes: each sender has its own space there, and is in one batch at a time.
    """

    def __init__(self, arena: Arena, shard: Shard, device: Device) -> None:
        self.num_instances = arena.world.num_instances
        self._arena, self._device = arena, device
        self._instance, self._tp_rank = arena.world.place(arena.rank)
        self._num_layers = shard.config.num_layers
        self._mailboxes = {size: self._mailbox(size, shard, _NUM_CHUNKS) for size in GROUP_SIZES}
        largest = self._mailbox(QUERY_ROOM, shard, _MORE_CHUNKS)
        for size in GROUP_STEP_SIZES:
            self._mailboxes.setdefault(size, largest.for_fewer(size))
        self.max_kv_room = min(MAX_KV_ROOM, largest.max_kv_rows(shard.kv_layout.row_bytes))
        self._largest = largest
        self._ranks = [arena.world.rank(i, self._tp_rank) for i in range(self.num_instances)]
        self._set_part(Lane.BATCH)
        self.begin({})  # loads its kernel before there are steps that wait for others

    def services(self) -> "Mapping[Lane, MailboxExchange]":
        """See KVExchange."""
        services = {lane: copy(self) for lane in LEASE_LANES}
        for lane, service in services.items():
            service._set_part(lane)
        return services

    def _set_part(self, lane: Lane) -> None:
        """Take part in steps as a member or as a holder, whose tables, clock and deadline are its own."""
        self._is_holder, self._deadline = lane.is_captured, self._arena.deadline(lane)
        device = self._device.torch_device
        self._tables = torch.zeros(3, self.num_instances, dtype=torch.int64, device=device)
        ranks, epoch = torch.tensor(self._ranks, device=device), self._arena.clock(lane)
        addresses, num_tokens, self._member_addresses = self._tables
        self._peers = Peers(addresses, num_tokens, ranks, epoch)

    def _mailbox(self, size: int, shard: Shard, max_num_chunks: int) -> Mailbox:
        shape = (self.num_instances, size, shard.num_heads, shard.config.head_dim)
        arena, dtype = self._arena, shard.config.torch_dtype
        return Mailbox.laid(arena.memory, arena.reserve, shape, dtype, max_num_chunks)

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """See GroupExchange. The device of a member waits until all members have opened this batch.

        Nobody waits for a holder to begin, nor does a holder for members. Its mailbox has room for a member's
        queries since that member merged the answer to its last ones, and it answers after queries only.
        """
        instance_ids = range(self.num_instances)
        addresses = [self._arena.host_addresses[rank] for rank in self._ranks]
        tables = [
            [addresses[i] if i in num_tokens or i in holder_ids else 0 for i in instance_ids],
            [num_tokens.get(i, 0) for i in instance_ids],
            [addresses[i] if i in num_tokens else 0 for i in instance_ids],
        ]
        self._tables.copy_(self._device.upload(torch.tensor(tables)))
        if not self._is_holder:
            opened = self._arena.opened[self._tp_rank :: self._arena.world.tp_size]
            members = self._peers._replace(addresses=self._member_addresses)
            await_members(opened, members, self._deadline)

    def gather(self, layer: int, q: Tensor) -> Tensor:
        """See GroupExchange."""
        return self._gathered(layer, q, self._mailboxes[len(q)])

    def own(self, part: Partial) -> Partial:
        """See GroupExchange."""
        size = len(part.lse) // self.num_instances
        rows = slice(self._instance * size, (self._instance + 1) * size)
        return Partial(part.out[rows], part.lse[rows])

    def merge(self, layer: int, part: Partial) -> Tensor:
        """See GroupExchange. Partials travel in the model's dtype, and are merged in the order of ids."""
        mailbox = self._mailboxes[len(part.out) // self.num_instances]
        parts = Partial(part.out.view_as(mailbox.parts.out), part.lse.view_as(mailbox.parts.lse))
        out = torch.empty_like(parts.out[0])
        exchange_partials(
            parts,
            mailbox,
            self._peers,
            self._deadline,
            instance=self._instance,
            layer=layer,
            out=out,
        )
        return out

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:
        """See KVExchange."""
        words = block.view(torch.int64) if block.dtype == torch.uint8 else block  # a put of bytes is slow
        mailbox = self._largest.halves(words)[layer % 2]
        came = self._gathered(layer, words.view(len(words), 1, -1), mailbox)
        return came.view(-1, *words.shape[1:]).view(block.dtype)

    def _gathered(self, layer: int, rows: Tensor, mailbox: Mailbox) -> Tensor:
        if layer == 0:
            self._peers.epoch.add_(self._num_layers)
        exchange_queries(rows, mailbox, self._peers, self._deadline, instance=self._instance, layer=layer)
        return mailbox.queries.flatten(0, 1)


def num_mailbox_bytes(num_instances: int, shard: Shard) -> int:
    """Return the bytes that the mailboxes of `num_instances` instances take in an arena, at most."""
    row_bytes = shard.config.mailbox_row_bytes(shard.size)
    return num_instances * (sum(GROUP_SIZES) + QUERY_ROOM) * row_bytes + (1 << 20)
