"""The configuration of `loong serve`, and what follows from it alone."""

from dataclasses import dataclass, field
from pathlib import Path

from loong.core.errors import ConfigError
from loong.engine.client import EngineLimits
from loong.hardware.chosen_cost_model import chosen_cost_model
from loong.hardware.devices import keeps_fp8
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.config import ClusterConfig
from loong.model.config import ModelConfig
from loong.observability.kv_events.config import KVEventsConfig
from loong.runs.run_logs import LogFiles
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import admissible_tokens
from loong.server.settings import ServerSettings


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
    num_api_servers: int = 1  # 1: this process, which is the engine's too
    log_format: str = "text"
    allows_faults: bool = False
    keeps_prefixes: bool = True
    kv_events: KVEventsConfig | None = None
    relays: bool = True

    def __post_init__(self) -> None:
        if self.kv_events is not None and self.kv_events.is_on and not self.keeps_prefixes:
            raise ConfigError("--kv-events-config needs prefix caching, which is off")
        if self.logs.events is not None and self.keeps_prefixes and not self.logs.keeps_prompts:
            raise ConfigError(
                "--event-log needs --event-log-prompts, because with prefix caching plans depend on prompts; "
                "or give --no-enable-prefix-caching"
            )


def engine_limits(config: ServeConfig) -> EngineLimits:
    """Return the most that one request may have, at the start and by its model.

    Raises `ConfigError` if the model cannot have so much, or the policy cannot run the instances.
    """
    model, cluster = config.model, config.cluster
    max_request_kv, most = (
        admissible_tokens(config.policy_name, cluster.first(number))
        for number in (cluster.num_instances, cluster.world_size)
    )
    max_model_len = config.max_model_len or min(model.max_length, most)
    model.check_max_length(max_model_len)
    if max_model_len > model.max_length:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model was made for {model.max_length}"
        )
    return EngineLimits(max_model_len, max_request_kv, model.vocab_size)


def served_cost_model(config: ServeConfig, limits: EngineLimits) -> WorkCostModel:
    """Return the cost model that plans begin with. Raises `ConfigError` if its file is of something else."""
    cluster = config.cluster
    return chosen_cost_model(
        config.cost_model,
        shape_of(config.model, keeps_fp8=keeps_fp8(config.device)),
        config.device,
        num_instances=cluster.world_size,
        tp_size=cluster.tp_size,
        host_ids=cluster.host_ids,
        greatest={
            "dop": cluster.world_size,
            "num_tokens": config.policy.max_num_batched_tokens,
            "num_keys": limits.max_model_len,
        },
    )
