"""The exchanges of a group's captured step: in each layer, queries and partials travel, or KV does."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from loong.attention.exchange import QueryExchange, QueryRouting
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

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """Set the members of the group in the next steps, in the open batch, and the tokens of each.

        They have T tokens at most. `holder_ids` are instances that serve the batch, which have none.
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

    def service(self) -> GroupExchange | None:
        """Return the exchange of steps of other groups that this instance serves; None if it cannot.

        Its `begin` names the members of that group. Queries of this instance are ignored.
        """


class NoExchange:
    """The exchange of an instance that is a group by itself. See GroupExchange."""

    num_instances = 1

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """See GroupExchange."""

    def gather(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return q

    def merge(self, layer: int, part: Partial) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return part.out


class FabricExchange:
    """Exchanges inside the open batch, by the messages of steps that the host launches. See KVExchange.

    All queries between CPU processes travel by one exchange, between members and to holders.
    """

    max_kv_rows = MAX_KV_ROWS

    def __init__(self, fabric: Fabric, instance_id: InstanceId, device: Device) -> None:
        self.num_instances = fabric.world.num_instances
        self._fabric, self._instance_id, self._device = fabric, instance_id, device
        self.begin({})

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """See GroupExchange."""
        assert not holder_ids, "it has no service"
        self._num_own = num_tokens.get(self._instance_id, 0)
        self._peers = {i: n for i, n in sorted(num_tokens.items()) if i != self._instance_id}
        routing = QueryRouting(dict.fromkeys(self._peers, torch.arange(self._num_own)), self._peers)
        self._step = QueryExchange(self._fabric, self._device, routing)

    def gather(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See GroupExchange."""
        self._step.send_queries(q)
        came = torch.split(self._step.peer_queries(), [*self._peers.values()])
        rows = self._rows_with(q)
        for peer_id, its_rows in zip(self._peers, came, strict=True):
            rows[peer_id, : len(its_rows)] = its_rows
        return rows.flatten(0, 1)

    def merge(self, layer: int, part: Partial) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See GroupExchange."""
        out = part.out.view(self.num_instances, -1, *part.out.shape[1:])
        lse = part.lse.view(self.num_instances, -1, *part.lse.shape[1:])
        total = Partial(out[self._instance_id].float().clone(), lse[self._instance_id].clone())
        theirs = Partial(
            torch.cat([out[0, :0], *(out[i, :n] for i, n in self._peers.items())]),
            torch.cat([lse[0, :0], *(lse[i, :n] for i, n in self._peers.items())]),
        )
        self._step.send_partials(theirs, total)
        return total.out.to(part.out.dtype)

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:  # noqa: ARG002 - messages come in their order
        """See KVExchange."""
        rows = self._rows_with(block)
        incoming = {i: rows[i, :count] for i, count in self._peers.items()}
        outgoing = dict.fromkeys(incoming, block[: self._num_own])
        self._fabric.exchange(outgoing, incoming, Channel.RING).wait()
        return rows.flatten(0, 1)

    def service(self) -> GroupExchange | None:
        """See KVExchange. Processors serve steps that the host launches."""
        return None

    def _rows_with(self, own: Tensor) -> Tensor:
        """Return room [N, T, ...] for the rows of all instances, with the own ones in it."""
        rows = own.new_zeros(self.num_instances, *own.shape)
        rows[self._instance_id] = own
        return rows
