"""The parts of a worker that differ by the kind of device; chosen once, at start."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.instance import MAX_SERVED_LEASES, Service
from loong.core.placement import InstanceId
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric
from loong.kernels import reference_draw
from loong.kernels.sampling.draw_params import DrawParams
from loong.model.device import CpuDevice, Device
from loong.model.tensor_parallel import Shard
from loong.worker.sampling.random_sampling import chances
from loong.worker.sampling.sampler import Sampler, TorchSampler
from loong.worker.steps.group_exchange import KVExchange


class Reading(Protocol):
    """Tensors on their way to the host."""

    def is_done(self) -> bool:
        """Return whether they have arrived, and all earlier work of the device is done."""

    def wait(self) -> Sequence[Tensor]:
        """Return copies on the host of the tensors' values at the time of the request."""


class Backend(Protocol):
    """A device, and its operations outside the model."""

    @property
    def device(self) -> Device:
        """Return the device on which models compute."""

    @property
    def sampler(self) -> Sampler:
        """Return the sampler for logits on the device."""

    @property
    def takes_leases(self) -> bool:
        """Return whether steps are captured, so that a decode lease runs without the host."""

    @property
    def graph_limits(self) -> CudaGraphLimits:
        """The limits within which single steps are captured, where `takes_leases`."""

    @property
    def least_saved(self) -> int | None:
        """The keys that a step must save to read once what its requests share. None: it never does."""

    @property
    def warm_up_lengths(self) -> tuple[int, ...]:
        """Return prompt lengths whose prefill compiles everything that prefill needs."""

    def connect(self, sockets: SocketFabric, shard: Shard) -> Fabric:
        """Return a fabric for tensors of the device, for a model of which this process holds `shard`."""

    @property
    def serves(self) -> Service:
        """The batches of other groups that this device serves, once it is connected."""

    @property
    def max_served_leases(self) -> int:
        """The leases of other groups that are served at a time by captured steps, at most."""

    def service(self) -> "Backend":
        """Return the backend of captured steps that serve others, in threads of their own.

        They run at the same time as all other steps.
        """

    def group_exchange(self, fabric: Fabric, instance_id: InstanceId, shard: Shard) -> KVExchange | None:
        """Return the exchange of queries or KV in captured steps of groups, over a fabric of `connect`.

        None if there is none, so that the host launches all steps of groups.
        """

    def draw(self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor) -> None:
        """Write the token [N] int64 and the largest logit [N] float32 of each row of logits [N, V]."""

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does the same as `call` on the same memory, possibly faster."""

    def read(self, *tensors: Tensor) -> Reading:
        """Begin to copy tensors to the host."""

    def end_warm_up(self) -> None:
        """Log from now on every compilation, since requests wait for it."""


class _Copies:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]

    def is_done(self) -> bool:
        return True

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class CpuBackend:
    """The processor, with the definitions of all kernels. See Backend."""

    def __init__(self, least_saved: int | None = 1) -> None:
        self.device, self.least_saved = CpuDevice(), least_saved
        self.sampler = TorchSampler()
        self.warm_up_lengths: tuple[int, ...] = ()
        self.serves, self.max_served_leases = Service.ALL, MAX_SERVED_LEASES
        self.takes_leases, self.graph_limits = False, NO_GRAPHS

    def connect(self, sockets: SocketFabric, shard: Shard) -> Fabric:  # noqa: ARG002 - see Backend
        """See Backend."""
        return sockets

    def service(self) -> Backend:
        """See Backend. Its operations keep nothing that others could disturb."""
        return self

    def group_exchange(
        self,
        fabric: Fabric,  # noqa: ARG002 - see Backend
        instance_id: InstanceId,  # noqa: ARG002 - see Backend
        shard: Shard,  # noqa: ARG002 - see Backend
    ) -> KVExchange | None:
        """See Backend."""
        return None

    def draw(self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor) -> None:
        """See Backend."""
        tokens.copy_(reference_draw.draw(logits, params, chances(params)))
        largest.copy_(logits.amax(dim=1))

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """See Backend."""
        return call

    def read(self, *tensors: Tensor) -> Reading:
        """See Backend."""
        return _Copies(tensors)

    def end_warm_up(self) -> None:
        """See Backend: nothing is ever compiled."""
