"""The exchange of queries and partials between the instances that take part in a step."""

from collections.abc import Mapping
from dataclasses import dataclass

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

    @property
    def is_empty(self) -> bool:
        """Return whether this instance neither sends nor receives queries."""
        return not self.sent_rows and not self.num_peer_rows


class QueryExchange:
    """The exchange of one step that the host launches, on a member or a holder, by messages to its peers.

    In each layer `send_queries`, `peer_queries` and `send_partials` are called once each, in this order.
    """

    def __init__(self, peers: Exchanging, device: Device, routing: QueryRouting) -> None:
        self._peers, self._device, self._num_peer_rows = peers, device, routing.num_peer_rows
        self._sent_rows = {peer_id: device.upload(rows) for peer_id, rows in routing.sent_rows.items()}
        self._peer_queries: Tensor | None = None
        self._pending: Pending | None = None

    def send_queries(self, q: Tensor) -> None:
        """Send those rows of q [T, H, D] that the peers attend."""
        outgoing = {peer_id: q[rows] for peer_id, rows in self._sent_rows.items()}
        self._peer_queries = q.new_empty(sum(self._num_peer_rows.values()), *q.shape[1:])
        places = zip(self._num_peer_rows, consecutive_slices(self._num_peer_rows.values()), strict=True)
        incoming = {peer_id: self._peer_queries[rows] for peer_id, rows in places}
        self._pending = self._peers.exchange(outgoing, incoming, Channel.QUERIES)

    def peer_queries(self) -> Tensor:
        """Return the queries received, peer by peer [n, H, D]."""
        assert self._pending is not None, "`send_queries` comes first"
        assert self._peer_queries is not None, "`send_queries` comes first"
        self._pending.wait()
        return self._peer_queries

    def send_partials(self, part: Partial, total: Partial) -> None:
        """Send attention of the peers' queries, peer by peer, and merge the partials that come back into
        `total`.

        They travel in the queries' dtype. `total` is float32 and has the T rows of the step.
        """
        assert self._peer_queries is not None, "`send_queries` comes first"
        _, num_heads, head_dim = part.out.shape
        sent = packed(part, self._peer_queries.dtype)
        slices = consecutive_slices(self._num_peer_rows.values())
        outgoing = {peer_id: sent[rows] for peer_id, rows in zip(self._num_peer_rows, slices, strict=True)}
        incoming = {peer_id: sent.new_empty(len(r), sent.shape[1]) for peer_id, r in self._sent_rows.items()}
        self._peers.exchange(outgoing, incoming, Channel.PARTIALS).wait()
        for peer_id, rows in self._sent_rows.items():
            self._device.merge_into(total, unpacked(incoming[peer_id], num_heads, head_dim), rows)


def packed(part: Partial, dtype: torch.dtype) -> Tensor:
    """Return a contiguous partial of n rows as one message [n, M]: out in `dtype`, then lse in float32."""
    return torch.cat((part.out.to(dtype).flatten(1), part.lse.view(dtype)), dim=1)


def unpacked(message: Tensor, num_heads: int, head_dim: int) -> Partial:
    """Return the partial, out [1, n, H, D] and lse [1, n, H], of a message."""
    num_values = num_heads * head_dim
    out, lse = message[:, :num_values], message[:, num_values:]
    return Partial(out.view(1, len(out), num_heads, head_dim), lse.view(torch.float32)[None])


def load_kernels(device: Device, q: Tensor, kv: Tensor) -> None:
    """Load the kernels that exchange queries and partials, and those that copy KV to and from slots.

    `q` [1, H, D] and the row kv [1, ...] are any token's. They are only read. Later, the driver may wait for
    the device before it loads a kernel, and the device for an exchange.
    """
    place = device.upload(torch.zeros(1, dtype=torch.int64))
    for sources, targets in ((None, place), (place, None)):
        device.copy_rows(kv, kv.clone(), source_rows=sources, target_rows=targets)
    _, num_heads, head_dim = q.shape
    for num_rows in (1, 2):  # strides of one row are others, and kernels differ by their strides
        total = Partial.unseen(q.new_zeros(num_rows, num_heads, head_dim), is_merged=True)
        message = packed(total._replace(lse=torch.zeros_like(total.lse)), q.dtype)
        rows = device.upload(torch.arange(num_rows))
        device.merge_into(total, unpacked(message, num_heads, head_dim), rows)
