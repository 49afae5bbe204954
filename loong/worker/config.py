"""The configuration of one worker process."""

from dataclasses import dataclass

from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.instance import (
    MAX_SERVED_LEASES,
    MAX_SERVED_LISTS,
    InstanceKind,
    home_instance_id,
    host_tier_id,
)
from loong.core.kv_layout import LentSlots
from loong.core.placement import InstanceId
from loong.fabric.messages.network import Network
from loong.fabric.world import World
from loong.messages.wire import HEARTBEAT_SECONDS

# A driver that loads a kernel lazily, at its first use, first waits for the device. A kernel on the device
# may itself wait for another process that does the same. So all kernels of torch are loaded at the start.
# A kernel that waits for a peer must not hold up other streams, so each has a queue of the device to itself.
ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
FABRICS = ("auto", "symmetric", "nccl", "staged")  # between the GPUs of a host; see loong/fabric/README.md


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One rank of one instance, and the addresses of the others. One of kind ATTENTION has no weights.

    Capacities are in tokens, deadlines and the time between heartbeats in seconds. `most_kv_capacity` is the
    greatest of all instances (0: the own), `window_kv_capacity` that of layers with a window (0: the same
    as of others). The host tier of instance i is instance `num_instances + i`, kept
    by the same processes. `model` is a folder, or with
    `load_format` "dummy" also the name of a built-in shape; JSON schemas need `tokenizer_folder`. `device`
    is cpu, or cuda for the host's GPUs in turn, among which `fabric` (one of FABRICS) moves tensors. A GPU
    serves `max_served_leases` of others at a time. `attention_kernels` is one of AttentionKernels, and
    `attention_tiles` are TileSizes that were measured (None: the usual ones). On a GPU, `graph_limits` say
    which steps are captured. A step reads what its requests share once if that saves reading the KV of
    `least_saved` tokens (None: never). A worker that `is_late` waits only for the ranks of its own instance,
    since other instances may be lost, or be yet to come. `num_instances` is the most that there can be, and
    `host_ids` has the host of each (empty: all are on one). Instances of several hosts find each other in a
    `network`, by whose secret the endpoints that begin with `tcp:` are guarded. The pool of one that `lends`
    is in memory that other processes can map. One with `lent` slots has its pool in those.
    """

    instance_id: InstanceId
    tp_rank: int
    num_instances: int
    tp_size: int
    model: str
    load_format: str
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str
    seed: int
    kv_capacity: int
    host_kv_capacity: int
    run_directory: str
    commands_endpoint: str
    reports_endpoint: str
    deadline: float
    num_threads: int
    heartbeat: float = HEARTBEAT_SECONDS
    kind: InstanceKind = InstanceKind.FULL
    most_kv_capacity: int = 0
    window_kv_capacity: int = 0
    device: str = "cpu"
    fabric: str = "auto"
    attention_kernels: str = "auto"
    max_served_leases: int = MAX_SERVED_LEASES
    attention_tiles: tuple[int, ...] | None = None
    graph_limits: CudaGraphLimits = NO_GRAPHS
    least_saved: int | None = 1
    tokenizer_folder: str | None = None
    log_format: str = "text"
    log_source: str = ""
    is_late: bool = False
    host_ids: tuple[int, ...] = ()
    network: Network | None = None
    lends: bool = False
    lent: LentSlots | None = None

    @property
    def world(self) -> World:
        """Return all processes."""
        return World(self.num_instances, self.tp_size, self.host_ids)

    @property
    def rank(self) -> int:
        """Return this process's rank in the world."""
        return self.world.rank(self.instance_id, self.tp_rank)

    @property
    def own_tier_id(self) -> InstanceId:
        """Return the id of this instance's host tier."""
        return host_tier_id(self.instance_id, self.num_instances)

    @property
    def max_lease_slots(self) -> int:
        """Return the slots that a captured lease can list on an instance, the same on all of them."""
        return MAX_SERVED_LISTS * max(self.kv_capacity, self.most_kv_capacity)

    def home_of(self, instance_id: InstanceId) -> InstanceId:
        """Return the instance whose processes keep the pool of `instance_id`, which may be a host tier."""
        return home_instance_id(instance_id, self.num_instances)
