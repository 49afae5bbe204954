"""A processor that captures steps by keeping their calls, and exchanges in groups by messages."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from loong.attention.exchange import QueryExchange, QueryRouting
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.placement import InstanceId
from loong.fabric.lanes import Lane
from loong.fabric.protocol import Exchanging, Fabric, NoPeers, OpenBatch
from loong.fabric.traffic import Channel
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.tensor_parallel import Shard
from loong.worker.backend import CpuBackend
from loong.worker.steps.group_exchange import GroupExchange, KVExchange
from loong.worker.steps.ring_inputs import MAX_KV_ROOM


class CapturingBackend(CpuBackend):
    """See Backend."""

    def __init__(self, graph_limits: CudaGraphLimits, *, takes_leases: bool = True) -> None:
        super().__init__()
        self.takes_leases, self.graph_limits = takes_leases, graph_limits

    def group_exchange(self, fabric: Fabric, instance_id: InstanceId, shard: Shard) -> KVExchange | None:
        """See Backend."""
        return FabricExchange(fabric, instance_id, self.device)


class FabricExchange:
    """Exchanges inside the open batch, by the messages of steps that the host launches. See KVExchange.

    It learns from the fabric which batch that is, as the arena's clock tells it to captured steps.
    """

    max_kv_room = MAX_KV_ROOM

    def __init__(self, fabric: Fabric, instance_id: InstanceId, device: Device) -> None:
        self.num_instances = fabric.world.num_instances
        self._peers_now: Exchanging = NoPeers(instance_id)
        self._instance_id, self._device = instance_id, device
        open_batch = fabric.batch

        @contextmanager
        def batch(
            batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
        ) -> Iterator[OpenBatch]:
            with open_batch(batch_id, group, holders) as opened:
                self._peers_now = opened
                yield opened

        vars(fabric)["batch"] = batch
        self.begin({})

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """See GroupExchange."""
        assert not holder_ids, "it has no service"
        self._num_own = num_tokens.get(self._instance_id, 0)
        self._peers = {i: n for i, n in sorted(num_tokens.items()) if i != self._instance_id}
        routing = QueryRouting(dict.fromkeys(self._peers, torch.arange(self._num_own)), self._peers)
        self._step = QueryExchange(self._peers_now, self._device, routing)

    def gather(self, layer: int, q: Tensor) -> Tensor:
        """See GroupExchange."""
        self._step.send_queries(q)
        came = torch.split(self._step.peer_queries(), [*self._peers.values()])
        rows = self._rows_with(q)
        for peer_id, its_rows in zip(self._peers, came, strict=True):
            rows[peer_id, : len(its_rows)] = its_rows
        return rows.flatten(0, 1)

    def own(self, part: Partial) -> Partial:
        """See GroupExchange."""
        size = len(part.lse) // self.num_instances
        rows = slice(self._instance_id * size, (self._instance_id + 1) * size)
        return Partial(part.out[rows], part.lse[rows])

    def merge(self, layer: int, part: Partial) -> Tensor:
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

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:
        """See KVExchange."""
        rows = self._rows_with(block)
        incoming = {i: rows[i, :count] for i, count in self._peers.items()}
        outgoing = dict.fromkeys(incoming, block[: self._num_own])
        self._peers_now.exchange(outgoing, incoming, Channel.RING).wait()
        return rows.flatten(0, 1)

    def services(self) -> Mapping[Lane, GroupExchange]:
        """See KVExchange. Processors serve steps that the host launches."""
        return {}

    def _rows_with(self, own: Tensor) -> Tensor:
        """Return room [N, T, ...] for the rows of all instances, with the own ones in it."""
        rows = own.new_zeros(self.num_instances, *own.shape)
        rows[self._instance_id] = own
        return rows
