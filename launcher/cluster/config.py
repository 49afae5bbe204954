"""The configuration of a cluster: its instances, their hosts, and the model they hold."""

from dataclasses import dataclass

from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.errors import ConfigError
from loong.core.instance import (
    MAX_SERVED_LEASES,
    ElasticInstance,
    InstanceKind,
    Service,
    spread_over_hosts,
    with_host_tiers,
)
from loong.messages.wire import HEARTBEAT_SECONDS


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The instances to start and the model they hold. Capacities are tokens an instance.

    On `device` cuda, the ranks of instances take the GPUs of the host in turn, and `fabric`, one of FABRICS,
    moves tensors among them. `attention_kernels` is one of AttentionKernels, and
    `attention_tiles` are TileSizes that were measured (None: the usual ones).
    On GPUs, `graph_limits` say which steps are captured, as in the cost model of plans. A step reads what its
    requests share once if that saves reading the KV of `least_saved` tokens (None: never).
    Each worker sends a heartbeat every `heartbeat` seconds. The instances are spread over `num_hosts` hosts,
    neighbors on the same one. With `hosts` "ray" these are nodes of a Ray cluster, else this one. While the
    cluster serves, it may grow to `max_instances` (None: not at all).
    """

    model: str
    load_format: str = "safetensors"
    dtype: str | None = None
    quantization: str | None = None
    seed: int = 0
    num_instances: int = 4
    max_instances: int | None = None
    num_hosts: int = 1
    hosts: str = "local"
    tp_size: int = 1
    kv_capacity: int = 16384
    host_kv_capacity: int = 0
    deadline: float = 60.0
    start_timeout: float = 600.0
    heartbeat: float = HEARTBEAT_SECONDS
    device: str = "cpu"
    fabric: str = "auto"
    attention_kernels: str = "auto"
    max_served_leases: int = MAX_SERVED_LEASES
    attention_tiles: tuple[int, ...] | None = None
    graph_limits: CudaGraphLimits = NO_GRAPHS
    least_saved: int | None = 1
    tokenizer_folder: str | None = None  # None: no request can be held to a JSON schema
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name in ("num_instances", "tp_size", "kv_capacity"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}")
        if not 1 <= self.max_served_leases <= MAX_SERVED_LEASES:
            raise ConfigError(
                f"--max-served-leases is {self.max_served_leases}; it can be 1 to {MAX_SERVED_LEASES}"
            )
        if self.num_hosts > self.num_instances:
            raise ConfigError(f"--num-hosts is {self.num_hosts}, but --num-instances is {self.num_instances}")
        self._check_max_instances()

    def _check_max_instances(self) -> None:
        if self.world_size < self.num_instances:
            raise ConfigError(
                f"--max-instances is {self.world_size}, but --num-instances is {self.num_instances}"
            )

    @property
    def world_size(self) -> int:
        """Return the most instances that there can be, for which ids and shared memory have room."""
        return self.num_instances if self.max_instances is None else self.max_instances

    @property
    def host_ids(self) -> tuple[int, ...]:
        """Return the host of each instance that there can be. Added ones take the hosts in turn."""
        num_more = self.world_size - self.num_instances
        added = tuple(i % self.num_hosts for i in range(num_more))
        return spread_over_hosts(self.num_instances, self.num_hosts) + added

    @property
    def instances(self) -> tuple[ElasticInstance, ...]:
        """Return the first instances, and their host tiers if there are any, all empty."""
        return self.first(self.num_instances)

    def first(self, num_instances: int) -> tuple[ElasticInstance, ...]:
        """Return the instances of the lowest ids, and their host tiers if there are any, all empty.

        GPUs serve others if their fabric allows it, which their workers report.
        """
        full = tuple(
            ElasticInstance(
                i,
                self.tp_size,
                InstanceKind.FULL,
                self.kv_capacity,
                serves=Service.of_workers(self.device),
                host_id=host_id,
                max_served_leases=self.max_served_leases,
                is_on_gpu=self.device != "cpu",
            )
            for i, host_id in enumerate(self.host_ids[:num_instances])
        )
        return with_host_tiers(full, self.world_size, self.host_kv_capacity)
