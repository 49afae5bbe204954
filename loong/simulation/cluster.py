"""The simulated hardware: instances, their KV pools and their cost model, for each policy."""

from dataclasses import astuple, dataclass, replace
from functools import cache

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind, Service, spread_over_hosts, with_host_tiers
from loong.core.window_memory import WindowMemory
from loong.hardware.cost_model_file import CostModelFile
from loong.hardware.devices import DEVICES
from loong.hardware.memory import MAX_AUTO_TOKENS
from loong.scheduler.cost.cost_model import Coefficients, MemoryReaders, WorkCostModel
from loong.scheduler.cost.roofline import ModelShape, kv_capacity, roofline
from loong.scheduler.policy import admissible_tokens, policy_kind, serve_each_other
from loong.workloads.metrics.backlog import WorkOf
from loong.workloads.metrics.slo import PrefillTime
from loong.workloads.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Instances, their cost model, and the most KV tokens that one request may need.

    `windows` is the memory of layers with a window, if it has room for fewer tokens than that of others.
    """

    instances: tuple[ElasticInstance, ...]
    cost_model: WorkCostModel
    max_request_tokens: int
    windows: WindowMemory | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """Instances of a model on one kind of device.

    The instances are spread over `num_hosts` hosts. `kv_cache_tokens` is an instance's pool; None is what its
    memory holds next to the weights. Each has `host_kv_tokens` more in memory of its host. Times are those of
    the `measured` cost model of each number of devices, or of the device's roofline if there is none.
    Besides, `memory_instances` have no weights, and `memory_kv_tokens` (None: what their devices hold). They
    attend and exchange as fast as a `memory_device`, if that is another one. Layers with a window keep as
    many tokens as `windows` has room for, and (None) as many as others.
    """

    shape: ModelShape
    device: str
    num_instances: int
    tp_size: int = 1
    kv_cache_tokens: int | None = None
    measured: tuple[CostModelFile, ...] = ()
    num_hosts: int = 1
    host_kv_tokens: int = 0
    memory_instances: int = 0
    memory_kv_tokens: int | None = None
    memory_device: str | None = None
    windows: WindowMemory | None = None

    def __post_init__(self) -> None:
        for flag, name in (("--device", self.device), ("--memory-device", self.memory_device or self.device)):
            if name not in DEVICES:
                raise ConfigError(f"{flag} {name!r} is unknown; choose from {', '.join(DEVICES)}")
        if self.memory_device is not None and not self.memory_instances:
            raise ConfigError("--memory-device needs --memory-instances")
        if self.num_hosts > self.num_instances:
            raise ConfigError(f"--num-hosts is {self.num_hosts}, but --num-instances is {self.num_instances}")

    def cluster(self, policy: str) -> SimulatedCluster:
        """Return all devices as `policy` runs them: as one instance, if one is all that it runs.

        Raises `ConfigError` if the model cannot be cut or does not fit, or the policy cannot run.
        """
        num_instances, tp_size, num_tokens = self.num_instances, self.tp_size, self.kv_cache_tokens
        if policy_kind(policy).max_instances == 1 < num_instances:
            num_instances, tp_size = 1, self.num_instances * self.tp_size
            num_tokens = None if num_tokens is None else num_tokens * self.num_instances
            self._check_one(policy, tp_size)
        capacity = self._fitting_tokens(tp_size) if num_tokens is None else num_tokens
        serves = Service.of_workers(self.device)
        instances = self._instances(num_instances, tp_size, capacity, serves)
        if policy_kind(policy).needs_service and not serve_each_other(instances):
            # without it the policy does not run; the report says so
            instances = self._instances(num_instances, tp_size, capacity, Service.ALL)
        max_tokens = admissible_tokens(policy, instances)
        num_pools = num_instances + self.memory_instances
        cost_model = self._cost_model(tp_size)
        cost_model = replace(
            cost_model,
            first_host_tier_id=num_pools,
            memory=self._memory_readers(num_instances, tp_size, cost_model.coefficients),
        )
        host_tokens = self.host_kv_tokens * self.num_instances // num_instances
        instances = with_host_tiers(instances, num_pools, host_tokens)
        return SimulatedCluster(instances, cost_model, max_tokens, self.windows)

    def unloaded_prefill(self) -> PrefillTime:
        """Return the seconds of a prefill that has the cluster to itself, the same for all policies.

        It runs at its best DoP.
        """
        return unloaded_prefill(self._cost_model(self.tp_size), self.num_instances)

    def unloaded_work(self) -> WorkOf:
        """Return the device seconds of a request that has an instance to itself, for all policies."""
        return unloaded_work(self._cost_model(self.tp_size), self.tp_size)

    @property
    def num_devices(self) -> int:
        """Return the devices of all instances, memory instances included."""
        return (self.num_instances + self.memory_instances) * self.tp_size

    def assumes_more_service(self, policy: str) -> bool:
        """Return whether instances serve more under a policy than workers on such devices do."""
        serves = Service.of_workers(self.device)
        instances = self._instances(self.num_instances, self.tp_size, 1, serves)
        return policy_kind(policy).needs_service and not serve_each_other(instances)

    def _instances(
        self, num_instances: int, tp_size: int, capacity: int, serves: Service
    ) -> tuple[ElasticInstance, ...]:
        host_ids = spread_over_hosts(num_instances, self.num_hosts)
        full = [(InstanceKind.FULL, capacity, host_id) for host_id in host_ids]
        memory = [
            (InstanceKind.ATTENTION, self._memory_tokens(tp_size), i % self.num_hosts)
            for i in range(self.memory_instances)
        ]
        return tuple(
            ElasticInstance(
                i, tp_size, kind, pool, serves=serves, host_id=host_id, is_on_gpu=self.device != "cpu"
            )
            for i, (kind, pool, host_id) in enumerate((*full, *memory))
        )

    @property
    def _window_tokens(self) -> int | None:
        return None if self.windows is None else self.windows.capacity

    def _memory_tokens(self, tp_size: int) -> int:
        """Return the tokens of a memory instance: those asked for, or what its device holds."""
        if self.memory_kv_tokens is not None:
            return self.memory_kv_tokens
        device = self.memory_device or self.device
        num_tokens = kv_capacity(
            self.shape, DEVICES[device], tp_size, has_weights=False, window_tokens=self._window_tokens
        )
        return min(num_tokens, MAX_AUTO_TOKENS) if device == "cpu" else num_tokens

    def _memory_readers(
        self, num_instances: int, tp_size: int, coefficients: Coefficients
    ) -> MemoryReaders | None:
        """Return how fast memory instances attend, if there are any.

        Another kind of device takes the given times in proportion to rooflines, and the slower of two links.
        """
        if not self.memory_instances:
            return None
        if self.memory_device in (None, self.device):
            return MemoryReaders(num_instances)
        own, other = DEVICES[self.device], DEVICES[self.memory_device or self.device]
        other = replace(other, link_bandwidth=min(own.link_bandwidth, other.link_bandwidth))
        before, after = (astuple(roofline(self.shape, kind, tp_size).coefficients) for kind in (own, other))
        seconds = zip(astuple(coefficients), before, after, strict=True)
        return MemoryReaders(num_instances, Coefficients(*(t * b / a if a else b for t, a, b in seconds)))

    def _check_one(self, policy: str, tp_size: int) -> None:
        if self.num_hosts > 1:
            raise ConfigError(
                f"--policy {policy} makes one instance of all, which cannot span --num-hosts {self.num_hosts}"
            )
        try:
            self.shape.check_cut(tp_size)
        except ConfigError as error:
            raise ConfigError(
                f"--policy {policy} makes one instance of all --num-instances {self.num_instances}; {error}"
            ) from error

    def _cost_model(self, tp_size: int) -> WorkCostModel:
        host_ids = spread_over_hosts(self.num_instances, self.num_hosts)
        if not self.measured:
            return roofline(self.shape, DEVICES[self.device], tp_size, host_ids)
        for file in self.measured:
            if file.tp_size == tp_size:
                file.check_fits(self.shape, tp_size, self.device)
                return file.cost_model(self.num_instances, host_ids)
        raise ConfigError(f"no --cost-model is of --tensor-parallel-size {tp_size}, which is to be simulated")

    def _fitting_tokens(self, tp_size: int) -> int:
        num_tokens = kv_capacity(self.shape, DEVICES[self.device], tp_size, window_tokens=self._window_tokens)
        if num_tokens < 1:
            taken = "the weights leave"
            if self.windows is not None:
                taken = f"the weights and --window-kv-tokens {self.windows.capacity} leave"
            raise ConfigError(
                f"{taken} no room for KV on {tp_size} x {self.device}; give a greater --tensor-parallel-size"
            )
        if self.device == "cpu":  # no more than `loong serve` takes, an instance of those asked for
            return min(num_tokens, MAX_AUTO_TOKENS * (tp_size // self.tp_size))
        return num_tokens


def unloaded_prefill(cost_model: CostModel, num_instances: int) -> PrefillTime:
    """Return the seconds of a prefill that has `num_instances` instances to itself, at the best DoP."""
    terms_by_dop = [cost_model.prefill_terms(dop + 1) for dop in range(num_instances)]

    @cache  # large clusters have many terms, and many prompts have equal lengths
    def seconds(num_tokens: int) -> float:
        return min(terms.time(num_tokens, 0, num_tokens**2) for terms in terms_by_dop)

    return seconds


def unloaded_work(cost_model: CostModel, tp_size: int) -> WorkOf:
    """Return the device seconds of a request: prefill on one instance, and the added time of its output.

    An output token counts as its addition to a decode step that runs in any case, since steps are shared: its
    computation, and the keys and values that it reads.
    """
    terms = cost_model.prefill_terms(1)
    nothing = cost_model.instance_time(InstanceWork(num_tokens=1))

    def device_seconds(request: WorkloadRequest) -> float:
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        prefill = terms.time(num_prompt, 0, num_prompt**2)
        keys = num_prompt + num_output // 2
        reading = cost_model.instance_time(InstanceWork(num_tokens=1, num_decode_keys=keys)) - nothing
        return tp_size * (prefill + (num_output - 1) * (terms.per_token + reading))

    return device_seconds
