"""The exchanges of a group's captured step: in each layer, queries and partials travel, or KV does."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from loong.core.placement import InstanceId
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.kernels import Partial
from loong.model.device import Device
from loong.worker.steps.ring_inputs import MAX_KV_ROWS


class GroupExchange(Protocol):
    """The exchanges of one instance. T is the same on all members of a group, N the world's instances."""

    @property
    def num_instances(self) -> int:
        """Return N."""

    def begin(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Set the masters of the next steps, in the open batch, and the tokens of each.

        They are all members of the group, and T tokens at most.
        """

    def gather(self, layer: int, q: Tensor) -> Tensor:
        """Return the queries [N * T, H, D] of all masters, from q [T, H, D] on each.

        Row i * T + t is token t of instance i; rows without a token may hold anything.
        """

    def merge(self, layer: int, part: Partial) -> Tensor:
        """Return attention [T, H, D] of this instance's tokens, merged from all members' parts."""


class KVExchange(GroupExchange, Protocol):
    """An exchange that can also send KV to all members.

    In such a step the tokens are those whose KV a member sends, at least one, and no queries are gathered.
    """

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:
        """Return the KV [N * T, 2, K, D] of all members, from `block` [T, 2, K, D] on each.

        Rows are as in `gather`. They are valid until the second next layer's is gathered.
        """

    @property
    def max_kv_rows(self) -> int:
        """Return the largest T of `gather_kv`."""


class NoExchange:
    """The exchange of an instance that is a group by itself. See GroupExchange."""

    num_instances = 1

    def begin(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """See GroupExchange."""

    def gather(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return q

    def merge(self, layer: int, part: Partial) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return part.out


class FabricExchange:
    """Exchanges by messages of the host, inside the open batch. See KVExchange."""

    max_kv_rows = MAX_KV_ROWS

    def __init__(self, fabric: Fabric, instance_id: InstanceId, device: Device) -> None:
        self.num_instances = fabric.world.num_instances
        self._fabric, self._instance_id, self._device = fabric, instance_id, device
        self._num_tokens: Mapping[InstanceId, int] = {}

    def begin(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """See GroupExchange."""
        self._num_tokens = num_tokens

    def gather(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See GroupExchange."""
        return self._gathered(q, Channel.QUERIES)

    def merge(self, layer: int, part: Partial) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See GroupExchange. Out and lse travel in one message, and are merged in the order of ids."""
        (num_queries, num_heads, head_dim), num_own = part.out.shape, self._num_tokens[self._instance_id]
        num_tokens = num_queries // self.num_instances
        messages = torch.cat((part.out.float(), part.lse[..., None]), dim=-1)
        messages = messages.view(self.num_instances, num_tokens, num_heads, head_dim + 1)
        outgoing = {i: messages[i, :n] for i, n in self._num_tokens.items() if i != self._instance_id}
        incoming = {i: torch.empty_like(messages[0, :num_own]) for i in outgoing}
        self._fabric.exchange(outgoing, incoming, Channel.PARTIALS).wait()
        incoming[self._instance_id] = messages[self._instance_id, :num_own]
        arrived = torch.stack([incoming[i] for i in sorted(incoming)])
        total = Partial.identity(num_tokens, num_heads, head_dim, arrived.device)
        parts = Partial(arrived[..., :-1], arrived[..., -1])
        self._device.merge_into(total, parts, torch.arange(num_own))
        return total.out.to(part.out.dtype)

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See KVExchange."""
        return self._gathered(block, Channel.RING)

    def _gathered(self, own: Tensor, channel: Channel) -> Tensor:
        rows = own.new_zeros(self.num_instances, *own.shape)
        rows[self._instance_id] = own
        incoming = {i: rows[i, :count] for i, count in self._num_tokens.items() if i != self._instance_id}
        outgoing = dict.fromkeys(incoming, own[: self._num_tokens[self._instance_id]])
        self._fabric.exchange(outgoing, incoming, channel).wait()
        return rows.flatten(0, 1)
