"""The configuration of `loong serve`, and what follows from it alone."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from loong.core.errors import ConfigError
from loong.engine.client import EngineLimits
from loong.engine.room_need import most_loan
from loong.hardware.chosen_cost_model import chosen_cost_model
from loong.hardware.devices import keeps_fp8
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.config import ClusterConfig
from loong.model.config import ModelConfig
from loong.observability.kv_events.config import KVEventsConfig
from loong.runs.run_logs import LogFiles
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import MemoryReaders, WorkCostModel
from loong.scheduler.policy import POLICIES, admissible_tokens, policy_kind
from loong.server.settings import ServerSettings

MAX_LOANS = 4  # that an engine can have of others
LENDING = ", ".join(name for name, k in POLICIES.items() if k.uses_memory and not k.is_bound_by_memory)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The configuration of `loong serve`."""

    model: ModelConfig
    cluster: ClusterConfig
    device: str
    policy_name: str
    policy: PolicyConfig
    cost_model: Path | None  # None: the device's roofline
    calibration_time: float  # seconds; 0 where the cost model stays as chosen
    is_recalibrated: bool
    server: ServerSettings
    tokenizer_folder: Path
    max_model_len: int | None  # None: what model and cluster can hold
    drain_timeout: float  # seconds
    trace_dir: Path | None = None  # None: no traces
    otlp_traces_endpoint: str | None = None  # None: no spans
    logs: LogFiles = field(default_factory=LogFiles)
    num_api_servers: int = 1  # 1: this process, which is the engine's too unless there are several
    num_engines: int = 1  # 1: this process
    lends: bool = False  # engines lend each other room
    log_format: str = "text"
    allows_faults: bool = False
    keeps_prefixes: bool = True
    kv_events: KVEventsConfig | None = None
    relays: bool = True

    def __post_init__(self) -> None:
        if self.num_engines > 1:
            self._check_engines()
        if self.device != "cpu" and policy_kind(self.policy_name).rotates:
            raise ConfigError(
                f"policy {self.policy_name} does not run on GPUs, whose captured steps take a lease whole; "
                "give --policy lamina"
            )
        if self.lends:
            self._check_lending()
        if self.device != "cpu" and (self.policy.max_micro_batches or 1) > 1:
            raise ConfigError("--max-micro-batches is 1 on GPUs, whose captured steps take a lease whole")
        if self.kv_events is not None and self.kv_events.is_on and not self.keeps_prefixes:
            raise ConfigError("--kv-events-config needs prefix caching, which is off")
        if self.logs.events is not None and self.keeps_prefixes and not self.logs.keeps_prompts:
            raise ConfigError(
                "--event-log needs --event-log-prompts, because with prefix caching plans depend on prompts; "
                "or give --no-enable-prefix-caching"
            )

    def _check_engines(self) -> None:
        """Raise `ConfigError` if engines cannot share the instances, or do not know a flag."""
        cluster, number = self.cluster, self.num_engines
        for flag, num_instances in (
            ("--num-instances", cluster.num_instances),
            ("--max-instances", cluster.most_instances),
        ):
            if num_instances % number:
                raise ConfigError(
                    f"{flag} is {num_instances}, but --num-engines {number} needs a multiple of {number}"
                )
        if cluster.memory_instances:
            raise ConfigError(
                f"--num-engines is {number}, but with --memory-instances {cluster.memory_instances} there "
                "can be 1: they serve the instances of one engine"
            )
        if cluster.num_instances < number * cluster.num_hosts:
            raise ConfigError(
                f"--num-instances is {cluster.num_instances}, but each of --num-engines {number} needs one "
                f"on each of --num-hosts {cluster.num_hosts}"
            )
        if self.kv_events is not None and self.kv_events.is_on:
            raise ConfigError(
                f"--num-engines is {number}, but --kv-events-config has one endpoint, for 1 engine"
            )

    def _check_lending(self) -> None:
        """Raise `ConfigError` if no engine can use room of another."""
        kind = policy_kind(self.policy_name)
        if not kind.uses_memory or kind.is_bound_by_memory:
            raise ConfigError(f"--lend needs a policy that can do without memory instances: {LENDING}")
        if self.device != "cpu":
            raise ConfigError(
                "--lend needs --device cpu: the fabrics of GPUs keep the memory of all peers mapped"
            )
        if self.num_engines < 2 and not self.cluster.max_loans:
            raise ConfigError("--lend needs --num-engines 2 or more")

    def of_engine(self, engine_id: int) -> "ServeConfig":
        """Return the configuration of one of several engines: a share of the instances, and its own files."""
        cluster, number = self.cluster, self.num_engines
        most, logs = cluster.max_instances, self.logs
        name = f"engine-{engine_id}"
        return replace(
            self,
            num_engines=1,
            num_api_servers=1,
            cluster=replace(
                cluster,
                num_instances=cluster.num_instances // number,
                max_instances=None if most is None else most // number,
                log_source=name,
                max_loans=MAX_LOANS if self.lends else 0,
            ),
            policy=replace(
                self.policy, max_loan=most_loan(cluster.kv_capacity) or None if self.lends else None
            ),
            server=replace(self.server, engine_id=engine_id, num_engines=number),
            trace_dir=None if self.trace_dir is None else self.trace_dir / name,
            logs=replace(logs, decisions=_named(logs.decisions, name), events=_named(logs.events, name)),
        )


def _named(path: Path | None, name: str) -> Path | None:
    """Return the path of a file with a name before its suffix."""
    return None if path is None else path.with_name(f"{path.stem}.{name}{path.suffix}")


def engine_limits(config: ServeConfig) -> EngineLimits:
    """Return the most that one request may have, at the start and by its model.

    Raises `ConfigError` if the model cannot have so much, or the policy cannot run the instances.
    """
    model, cluster = config.model, config.cluster
    max_request_kv, most = (
        admissible_tokens(config.policy_name, cluster.first(number)) + (config.policy.max_loan or 0)
        for number in (cluster.num_instances, cluster.most_instances)
    )
    max_model_len = config.max_model_len or min(model.max_length, most)
    if max_model_len > model.max_length:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model was made for {model.max_length}"
        )
    return EngineLimits(max_model_len, max_request_kv, model.vocab_size)


def served_cost_model(config: ServeConfig, limits: EngineLimits) -> WorkCostModel:
    """Return the cost model that plans begin with. Raises `ConfigError` if its file is of something else."""
    cluster = config.cluster
    model = chosen_cost_model(
        config.cost_model,
        shape_of(config.model, keeps_fp8=keeps_fp8(config.device)),
        config.device,
        num_instances=cluster.world_size,
        tp_size=cluster.tp_size,
        host_ids=cluster.host_ids,
        greatest={
            "dop": cluster.most_instances,
            "num_tokens": config.policy.max_num_batched_tokens,
            "num_keys": limits.max_model_len,
        },
    )
    if not (cluster.memory_instances or cluster.max_loans):
        return model
    return replace(model, memory=MemoryReaders(cluster.most_instances))
