"""Instances and the groups they form."""

from dataclasses import dataclass
from enum import Enum

from loong.core.errors import InvalidPlanError
from loong.core.placement import InstanceId
from loong.core.value import value


class InstanceKind(Enum):
    """The capabilities of an instance."""

    FULL = "full"  # weights and KV: every kind of work
    ATTENTION = "attention"  # a memory instance: KV without weights. It serves, and is no member of a group
    HOST = "host"  # a host-memory tier: keeps KV, computes nothing


MAX_SERVED_TOKENS = 256
MAX_SERVED_LISTS = (
    4  # times an instance's KV that a served lease lists: choices of one prompt all list its KV
)
MAX_MOVING_TOKENS = (
    16_384  # of owners that are no requests, from one instance to another at a time: other KV waits behind it
)
MAX_SERVED_LEASES = 4  # that an instance can serve at a time by captured steps


class Service(Enum):
    """The batches of other groups that an instance serves at a time.

    It attends their queries over its KV, and stores KV that their steps push to it. `OWN_HOST` is of groups
    on its own host: any steps, and `ElasticInstance.max_served_leases` decode leases of up to
    MAX_SERVED_TOKENS tokens a master.
    """

    NONE = "none"
    OWN_HOST = "own host"
    ALL = "all"  # any number of any batches

    @classmethod
    def of_workers(cls, device: str) -> "Service":
        """Return what workers on such devices serve, where their fabric allows it."""
        return cls.ALL if device == "cpu" else cls.OWN_HOST


@value
class ElasticInstance:
    """One tensor-parallel set of devices with one KV pool and, unless for memory, one replica of the weights.

    `kv_used` counts tokens, reserved ones included: at most `kv_capacity`. `batch_id` is the running
    batch of whose group it is a member, None when idle. An instance `serves` batches of other groups, also
    while it runs a batch of its own. One that `is_draining` is to leave: it takes no new batch and no new KV.
    Instances with one `host_id` are on one machine. `kv_cached` counts other tokens, which no request reads:
    they go when their room is needed. `max_served_leases` are the decode leases of others that an instance
    with `Service.OWN_HOST` serves at a time. One that `is_on_gpu` keeps KV in the memory of GPUs, any other
    in that of its host.
    A host tier is `tier_of` the instance whose processes keep it.
    """

    instance_id: InstanceId
    tp_size: int
    kind: InstanceKind
    kv_capacity: int
    kv_used: int = 0
    batch_id: int | None = None
    serves: Service = Service.ALL
    is_draining: bool = False
    host_id: int = 0
    kv_cached: int = 0
    max_served_leases: int = MAX_SERVED_LEASES
    is_on_gpu: bool = False
    tier_of: InstanceId | None = None

    @property
    def kv_free(self) -> int:
        """Return the tokens that it still takes."""
        return 0 if self.is_draining else self.kv_capacity - self.kv_used

    def using(self, kv_used: int) -> "ElasticInstance":
        """Return the same instance with `kv_used` tokens in its pool."""
        return self._with(kv_used, self.batch_id, self.kv_cached)

    def holding(self, kv_used: int, kv_cached: int) -> "ElasticInstance":
        """Return the same instance with tokens in use, and others that nobody reads, in its pool."""
        return self._with(kv_used, self.batch_id, kv_cached)

    def running(self, batch_id: int | None) -> "ElasticInstance":
        """Return the same instance with this batch, or none."""
        return self._with(self.kv_used, batch_id, self.kv_cached)

    def _with(self, kv_used: int, batch_id: int | None, kv_cached: int) -> "ElasticInstance":
        return ElasticInstance(  # by position, which is faster than by name
            self.instance_id,
            self.tp_size,
            self.kind,
            self.kv_capacity,
            kv_used,
            batch_id,
            self.serves,
            self.is_draining,
            self.host_id,
            kv_cached,
            self.max_served_leases,
            self.is_on_gpu,
            self.tier_of,
        )

    def can_serve(self, member: "ElasticInstance") -> bool:
        """Return whether it serves batches of groups with `member`.

        Processors serve no GPUs: a captured step cannot wait for them.
        """
        if self.is_on_gpu != member.is_on_gpu:
            return False
        return self.serves is Service.ALL or (
            self.serves is Service.OWN_HOST and self.host_id == member.host_id
        )

    def takes_lease(self, num_served: int) -> bool:
        """Return whether it can serve a decode lease while it serves `num_served` others."""
        return self.serves is Service.ALL or num_served < self.max_served_leases

    @property
    def is_idle(self) -> bool:
        """Return whether it can be a member of a batch now, however many batches it serves."""
        return self.batch_id is None and self.takes_batches

    @property
    def takes_batches(self) -> bool:
        """Return whether it can be a member of a batch, now or when its batch has ended."""
        return self.kind is InstanceKind.FULL and not self.is_draining


def spread_over_hosts(num_instances: int, num_hosts: int) -> tuple[int, ...]:
    """Return the host of each instance: neighbors are on the same host, and hosts have equally many."""
    return tuple(i * num_hosts // num_instances for i in range(num_instances))


def host_tier_id(instance_id: InstanceId, num_instances: int) -> InstanceId:
    """Return the id of the host tier of an instance; `num_instances` does not count host tiers."""
    return num_instances + instance_id


def home_instance_id(instance_id: InstanceId, num_instances: int) -> InstanceId:
    """Return the instance whose processes keep the pool of `instance_id`, which may be a host tier."""
    return instance_id % num_instances


def with_host_tiers(
    instances: tuple[ElasticInstance, ...], num_instances: int, kv_capacity: int
) -> tuple[ElasticInstance, ...]:
    """Return instances, and an empty host tier of each with weights, if these are to hold tokens.

    There can be `num_instances`, without host tiers.
    """
    tiers = [
        ElasticInstance(
            host_tier_id(i.instance_id, num_instances),
            i.tp_size,
            InstanceKind.HOST,
            kv_capacity,
            host_id=i.host_id,
            tier_of=i.instance_id,
        )
        for i in instances
        if i.kind is InstanceKind.FULL
    ]
    return (*instances, *(tiers if kv_capacity else ()))


@dataclass(frozen=True, slots=True)
class ESPGroup:
    """The instances that run one batch; their order is the ring order."""

    instance_ids: tuple[InstanceId, ...]

    def __post_init__(self) -> None:
        if not self.instance_ids:
            raise InvalidPlanError("a group needs at least one instance")
        if len(set(self.instance_ids)) < len(self.instance_ids):
            raise InvalidPlanError(f"group {self.instance_ids} names an instance twice")

    @property
    def dop(self) -> int:
        """Return the degree of parallelism: the number of instances."""
        return len(self.instance_ids)

    @property
    def leader_id(self) -> InstanceId:
        """Return the instance that decides, at each step boundary, whether a lease goes on."""
        return self.instance_ids[0]

    def source_at(self, instance_id: InstanceId, ring_step: int) -> InstanceId:
        """Return the instance whose KV block is at `instance_id` in a ring step.

        Blocks advance by one a step.
        """
        return self.instance_ids[(self.instance_ids.index(instance_id) - ring_step) % self.dop]
