"""Protocols of the query exchange, and an implementation by messages of a fabric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.attention.attention_step import consecutive_slices
from loong.core.placement import InstanceId
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.traffic import Channel
from loong.kernels import Partial
from loong.model.device import Device


@dataclass(frozen=True, slots=True)
class QueryRouting:
    """The query rows that one instance sends and receives in a step, by peer in ascending order.

    A row is a query token.
    """

    sent_rows: Mapping[InstanceId, Tensor]  # by peer: rows [n] int64 of the step whose queries go there
    num_peer_rows: Mapping[InstanceId, int]  # by peer: number of rows that come from there
    most_rows: int  # sent from any instance of the group to any other; equal on all of them
    has_holders: bool = False  # outside the group

    @property
    def is_empty(self) -> bool:
        """Return whether this instance neither sends nor receives queries."""
        return not self.sent_rows and not self.num_peer_rows


class StepExchange(Protocol):
    """The exchange of one step on one instance.

    In each layer its methods are called once each, in this order.
    """

    def send_queries(self, q: Tensor) -> None:
        """Send those rows of q [T, H, D] that the peers attend."""

    def peer_queries(self) -> Tensor:
        """Return the queries received, peer by peer [n, H, D]. They are valid until `send_partials`."""

    def send_partials(self, part: Partial, total: Partial) -> None:
        """Send attention of the peers' queries, peer by peer, and merge the partials that come back into
        `total`.

        `part` may have the queries' dtype. `total` is float32 and has the T rows of the step.
        """


class QueryExchange(Protocol):
    """The exchanges of one instance, for any group that it is in."""

    def begin(self, routing: QueryRouting) -> StepExchange:
        """Begin the exchange of a step of the open batch. All members of the group begin all its steps."""


class MessageExchange:
    """Implements QueryExchange by messages of a fabric.

    Sizes are not limited, but each message costs host time.
    """

    def __init__(self, fabric: Exchanging, device: Device) -> None:
        self._fabric, self._device = fabric, device

    def begin(self, routing: QueryRouting) -> StepExchange:
        """See QueryExchange."""
        rows = {peer_id: self._device.upload(rows) for peer_id, rows in routing.sent_rows.items()}
        return _Messages(self._fabric, self._device, rows, routing.num_peer_rows)


class _Messages:
    """Implements StepExchange. Out in the queries' dtype, and lse in float32, are one message."""

    def __init__(
        self,
        fabric: Exchanging,
        device: Device,
        sent_rows: Mapping[InstanceId, Tensor],
        num_peer_rows: Mapping[InstanceId, int],
    ) -> None:
        self._fabric, self._device, self._sent_rows, self._num_peer_rows = (
            fabric,
            device,
            sent_rows,
            num_peer_rows,
        )
        self._peer_queries: Tensor | None = None
        self._pending: Pending | None = None

    def send_queries(self, q: Tensor) -> None:
        """See StepExchange."""
        outgoing = {peer_id: q[rows] for peer_id, rows in self._sent_rows.items()}
        self._peer_queries = q.new_empty(sum(self._num_peer_rows.values()), *q.shape[1:])
        places = zip(self._num_peer_rows, consecutive_slices(self._num_peer_rows.values()), strict=True)
        incoming = {peer_id: self._peer_queries[rows] for peer_id, rows in places}
        self._pending = self._fabric.exchange(outgoing, incoming, Channel.QUERIES)

    def peer_queries(self) -> Tensor:
        """See StepExchange."""
        assert self._pending is not None, "`send_queries` comes first"
        assert self._peer_queries is not None, "`send_queries` comes first"
        self._pending.wait()
        return self._peer_queries

    def send_partials(self, part: Partial, total: Partial) -> None:
        """See StepExchange."""
        assert self._peer_queries is not None, "`send_queries` comes first"
        head_dim, dtype = part.out.shape[-1], self._peer_queries.dtype
        partials = torch.cat((part.out.to(dtype), part.lse[..., None].view(dtype)), dim=-1)
        slices = consecutive_slices(self._num_peer_rows.values())
        outgoing = {
            peer_id: partials[rows] for peer_id, rows in zip(self._num_peer_rows, slices, strict=True)
        }
        incoming = {
            peer_id: partials.new_empty(len(r), *partials.shape[1:]) for peer_id, r in self._sent_rows.items()
        }
        self._fabric.exchange(outgoing, incoming, Channel.PARTIALS).wait()
        for peer_id, rows in self._sent_rows.items():
            came = incoming[peer_id][None]
            lse = came[..., head_dim:].view(torch.float32)[..., 0]
            self._device.merge_into(total, Partial(came[..., :head_dim], lse), rows)
