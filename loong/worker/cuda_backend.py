"""A worker's part on an NVIDIA GPU."""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from loong.core.attention_kernels import AttentionKernels
from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.instance import MAX_SERVED_LEASES, Service
from loong.core.placement import InstanceId
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric
from loong.kernels import gpu
from loong.kernels.late_compilation import warn_of_compilation
from loong.kernels.sampling.draw_params import DrawParams
from loong.model.cuda_device import CudaDevice, ServiceDevice
from loong.model.tensor_parallel import Shard
from loong.model.tiles import TileSizes
from loong.worker.backend import Reading
from loong.worker.sampling.cuda_sampler import CudaSampler
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.mailbox_exchange import MailboxExchange, num_mailbox_bytes

_WARM_UP_LENGTHS = (16, 1000, 6000, 9000)  # kernels and cuDNN choose an algorithm for each
_LARGEST_STEP = 4  # the memory of the largest step of a group, in that of the largest step of the warm-up


class _PinnedCopies:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for pinned, tensor in zip(self._copies, tensors, strict=True):
            pinned.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        self._event.record()

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch's own

    def wait(self) -> Sequence[Tensor]:
        self._event.synchronize()
        return self._copies


class CudaBackend:
    """One GPU, for a model of `dtype`; `fabric` is one of FABRICS. See Backend."""

    def __init__(
        self,
        index: int,
        dtype: torch.dtype,
        fabric: str = "auto",
        tiles: TileSizes | None = None,
        graph_limits: CudaGraphLimits = NO_GRAPHS,
        kernels: AttentionKernels = AttentionKernels.AUTO,
        least_saved: int | None = 1,
    ) -> None:
        self.least_saved = least_saved
        self._index, self._dtype, self._fabric, self.graph_limits = index, dtype, fabric, graph_limits
        self.serves, self.max_served_leases = Service.NONE, MAX_SERVED_LEASES
        self.device = CudaDevice(index, dtype, tiles, kernels)
        self.sampler = CudaSampler(self.device)
        self.takes_leases = True
        self.warm_up_lengths: tuple[int, ...] = _WARM_UP_LENGTHS
        self._memory: torch.cuda._POOL_HANDLE | None = None  # of all graphs, which never run at once

    def connect(self, sockets: SocketFabric, shard: Shard) -> Fabric:
        """See Backend."""
        from loong.fabric.cuda_fabrics import connect_gpus  # not at the top: it needs a GPU's driver

        world = sockets.world
        num_instances, has_neighbors = world.num_instances, world.has_neighbors(sockets.rank)
        spare_bytes = num_mailbox_bytes(num_instances, shard) if has_neighbors else 0
        fabric = connect_gpus(self._fabric, sockets, self._index, spare_bytes)
        self.takes_leases = world.tp_size == 1 or fabric.arena is not None
        if has_neighbors and fabric.arena is not None:
            self.serves = Service.OWN_HOST
        return fabric

    def service(self) -> "CudaBackend":
        """See Backend. It has a stream, graphs and workspaces of its own."""
        service = copy(self)
        service.device, service._memory = ServiceDevice(self._index), None
        return service

    def group_exchange(
        self,
        fabric: Fabric,
        instance_id: InstanceId,  # noqa: ARG002 - see Backend
        shard: Shard,
    ) -> KVExchange | None:
        """See Backend."""
        if fabric.arena is None or not fabric.world.has_neighbors(fabric.arena.rank):
            return None
        return MailboxExchange(fabric.arena, shard, self.device)

    def draw(self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor) -> None:
        """See Backend."""
        gpu.draw(logits, params, workspace=self.sampler.workspace(logits), tokens=tokens, largest=largest)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """See Backend.

        `call` is run once before, so that its kernels are compiled and its memory is allocated.
        """
        with self.device.capturing():
            call()
            self.device.wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=self.device.stream):
                call()
        self._memory = graph.pool()
        return graph.replay

    def read(self, *tensors: Tensor) -> Reading:
        """See Backend."""
        return _PinnedCopies(tensors)

    def end_warm_up(self) -> None:
        """See Backend."""
        self._keep_memory()
        warn_of_compilation()

    def _keep_memory(self) -> None:
        """Take memory for larger steps from the driver."""
        num_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        self.device.keep_memory(_LARGEST_STEP * num_bytes)
