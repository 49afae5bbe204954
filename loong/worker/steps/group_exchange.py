"""Where the queries of a group's captured step meet its KV: in each layer queries go out and partials come
back, or KV goes to all.
"""

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
        """N."""

    def begin(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Let the next steps, in the batch that is open, be those of these masters of so many tokens.

        They are all members of the group, and T tokens at most.
        """

    def gather(self, layer: int, q: Tensor) -> Tensor:
        """The queries [N * T, H, D] of all masters, of q [T, H, D] on each.

        Row i * T + t is token t of instance i; those of no token may hold anything.
        """

    def merge(self, layer: int, part: Partial) -> Tensor:
        """Attention [T, H, D] of this instance's tokens, of what each member has of all: `part` here."""


class KVExchange(GroupExchange, Protocol):
    """One that takes KV to all, too: where a step gathers that, tokens are those that each member brings.

    Each brings one at least, and such a step gathers no queries.
    """

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:
        """The KV [N * T, 2, K, D] that members bring, of `block` [T, 2, K, D] on each; rows as in `gather`.

        It is there until the second next layer's is gathered.
        """

    @property
    def max_kv_rows(self) -> int:
        """T of `gather_kv`, at most."""


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
    """Exchanges by messages of the host, inside the batch that is open. See KVExchange."""

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
