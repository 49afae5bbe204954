"""What a worker does differently on each kind of device; chosen once, at start."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from loong.attention.exchange import MessageExchange, QueryExchange
from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.placement import InstanceId
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Fabric, ServingFabric
from loong.kernels import reference_draw
from loong.kernels.sampling.draw_params import DrawParams
from loong.model.device import CpuDevice, Device
from loong.model.tensor_parallel import Shard
from loong.worker.sampling.random_sampling import uniform
from loong.worker.sampling.sampler import Sampler, TorchSampler
from loong.worker.steps.group_exchange import FabricExchange, KVExchange


class Reading(Protocol):
    """Tensors on their way to the host."""

    def is_done(self) -> bool:
        """Whether they have arrived, and all is done that the device was asked for before."""

    def wait(self) -> Sequence[Tensor]:
        """Copies on the host of what the tensors were when they were asked for."""


class Backend(Protocol):
    """A device, and what runs on it beside a model."""

    @property
    def device(self) -> Device:
        """Where models compute."""

    @property
    def sampler(self) -> Sampler:
        """How tokens are chosen of logits that lie there."""

    @property
    def takes_leases(self) -> bool:
        """Whether steps are captured, and those of decode leases follow each other without the host."""

    @property
    def graph_limits(self) -> CudaGraphLimits:
        """The limits within which single steps are captured, where `takes_leases`."""

    @property
    def warm_up_lengths(self) -> tuple[int, ...]:
        """Prompts of these lengths, prefilled once, let everything be compiled that prefill needs."""

    def connect(self, sockets: SocketFabric, shard: Shard) -> Fabric:
        """A fabric for the tensors of the device, of a model of which this process holds `shard`."""

    def serving_fabric(self, sockets: SocketFabric) -> ServingFabric | None:
        """Return how this device serves batches of other groups; None if it cannot."""

    def query_exchange(self, fabric: Fabric, shard: Shard) -> QueryExchange:
        """How steps that the host launches exchange queries, over a fabric that `connect` gave."""

    def group_exchange(self, fabric: Fabric, instance_id: InstanceId, shard: Shard) -> KVExchange | None:
        """How captured steps of groups exchange queries or KV, over a fabric that `connect` gave.

        None if they cannot, so that groups take steps which the host launches.
        """

    def draw(self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor) -> None:
        """Write the token [N] int64 and the largest logit [N] float32 of each row of logits [N, V]."""

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Something that does what `call` does, which may have to be quicker, on the same memory."""

    def read(self, *tensors: Tensor) -> Reading:
        """Begin to copy tensors to the host."""

    def end_warm_up(self) -> None:
        """Log from now on what has to be compiled, for requests wait for it."""


class _Copies:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]

    def is_done(self) -> bool:
        return True

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class CpuBackend:
    """The processor, with the definitions of all kernels. See Backend."""

    def __init__(self, *, takes_leases: bool = False, graph_limits: CudaGraphLimits = NO_GRAPHS) -> None:
        """Compute eagerly; `takes_leases` and `graph_limits` serve tests only: no host is waited for."""
        self.device = CpuDevice()
        self.sampler = TorchSampler()
        self.warm_up_lengths: tuple[int, ...] = ()
        self.takes_leases, self.graph_limits = takes_leases, graph_limits

    def connect(self, sockets: SocketFabric, shard: Shard) -> Fabric:  # noqa: ARG002 - see Backend
        """See Backend."""
        return sockets

    def serving_fabric(self, sockets: SocketFabric) -> ServingFabric | None:
        """See Backend."""
        return sockets

    def query_exchange(self, fabric: Fabric, shard: Shard) -> QueryExchange:  # noqa: ARG002 - see Backend
        """See Backend."""
        return MessageExchange(fabric, self.device)

    def group_exchange(
        self,
        fabric: Fabric,
        instance_id: InstanceId,
        shard: Shard,  # noqa: ARG002 - see Backend
    ) -> KVExchange | None:
        """See Backend."""
        return FabricExchange(fabric, instance_id, self.device)

    def draw(self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor) -> None:
        """See Backend."""
        rows = zip(params.seed.tolist(), params.position.tolist(), strict=True)
        chance = torch.tensor([uniform(seed, position) for seed, position in rows], dtype=torch.float64)
        tokens.copy_(reference_draw.draw(logits, params, chance))
        largest.copy_(logits.amax(dim=1))

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """See Backend."""
        return call

    def read(self, *tensors: Tensor) -> Reading:
        """See Backend."""
        return _Copies(tensors)

    def end_warm_up(self) -> None:
        """See Backend: nothing is ever compiled."""
