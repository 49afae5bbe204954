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
from loong.core.placement import InstanceId
from loong.core.window_memory import WindowMemory
from loong.engine.cluster_size import MemoryNumbers
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
    cluster serves, it may grow to `max_instances` (None: not at all). Besides, `memory_instances` have no
    weights and `memory_kv_capacity` (None: `kv_capacity`). Besides, up to `max_loans` are room of other
    engines, and this cluster lends such room.
    """

    model: str
    load_format: str = "safetensors"
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    seed: int = 0
    num_instances: int = 4
    max_instances: int | None = None
    memory_instances: int = 0
    max_loans: int = 0
    num_hosts: int = 1
    hosts: str = "local"
    tp_size: int = 1
    kv_capacity: int = 16384
    memory_kv_capacity: int | None = None
    host_kv_capacity: int = 0
    windows: WindowMemory | None = None  # None: layers with a window keep all KV
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
    log_source: str = ""  # of its workers, in each line; empty: there is one engine

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
        if self.memory_instances < 0 or self.memory_numbers.kv_capacity < 1:
            raise ConfigError(
                f"memory_instances is {self.memory_instances}, each with room for "
                f"{self.memory_numbers.kv_capacity} tokens; it can be 0 or more, with room for 1 at least"
            )
        self._check_max_instances()

    def _check_max_instances(self) -> None:
        if self.most_instances < self.num_instances:
            raise ConfigError(
                f"--max-instances is {self.most_instances}, but --num-instances is {self.num_instances}"
            )

    @property
    def most_instances(self) -> int:
        """Return the most instances with weights that there can be."""
        return self.num_instances if self.max_instances is None else self.max_instances

    @property
    def world_size(self) -> int:
        """Return the most instances that there can be, for which ids and shared memory have room."""
        return self.most_instances + self.memory_instances + self.max_loans

    @property
    def loan_ids(self) -> range:
        """Return the ids of instances that are room of other engines."""
        return range(self.most_instances + self.memory_instances, self.world_size)

    @property
    def memory_numbers(self) -> MemoryNumbers:
        """Return the numbers of memory instances, all of which are there at the start."""
        capacity = self.kv_capacity if self.memory_kv_capacity is None else self.memory_kv_capacity
        return MemoryNumbers(self.memory_instances, self.memory_instances, capacity)

    @property
    def host_ids(self) -> tuple[int, ...]:
        """Return the host of each instance that there can be. Added ones take the hosts in turn.

        So do memory instances, which come next. Loans come last. In a Ray cluster the engine that lends
        chooses their nodes. So each loan counts as a host of its own.
        """
        num_more = self.most_instances - self.num_instances
        added, memory = ([i % self.num_hosts for i in range(n)] for n in (num_more, self.memory_instances))
        loans = [self.num_hosts + i if self.hosts == "ray" else 0 for i in range(self.max_loans)]
        return (*spread_over_hosts(self.num_instances, self.num_hosts), *added, *memory, *loans)

    @property
    def instances(self) -> tuple[ElasticInstance, ...]:
        """Return the first instances, and their host tiers if there are any, all empty."""
        return self.first(self.num_instances)

    def first(self, num_instances: int) -> tuple[ElasticInstance, ...]:
        """Return the instances of the lowest ids, memory instances, and host tiers if any, all empty.

        GPUs serve others if their fabric allows it, which their workers report.
        """
        memory_ids = range(self.most_instances, self.loan_ids.start)
        instances = tuple(self._instance(i) for i in (*range(num_instances), *memory_ids))
        return with_host_tiers(instances, self.world_size, self.host_kv_capacity)

    def kind_of(self, instance_id: InstanceId) -> InstanceKind:
        """Return whether an instance has weights, by its id."""
        return InstanceKind.FULL if instance_id < self.most_instances else InstanceKind.ATTENTION

    def kv_capacity_of(self, instance_id: InstanceId) -> int:
        """Return the tokens of KV on an instance, by its id."""
        is_full = self.kind_of(instance_id) is InstanceKind.FULL
        return self.kv_capacity if is_full else self.memory_numbers.kv_capacity

    def _instance(self, instance_id: InstanceId) -> ElasticInstance:
        return ElasticInstance(
            instance_id,
            self.tp_size,
            self.kind_of(instance_id),
            self.kv_capacity_of(instance_id),
            serves=Service.of_workers(self.device),
            host_id=self.host_ids[instance_id],
            max_served_leases=self.max_served_leases,
            is_on_gpu=self.device != "cpu",
        )
