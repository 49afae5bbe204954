"""What `loong bench` was asked to do, checked."""

from dataclasses import dataclass, field
from pathlib import Path

from loong.core.errors import ConfigError
from loong.launcher.embedded import ServerConfig
from loong.workloads.slo import SLORule


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What is sent. `request_rate` is in requests a second, `request_timeout` in seconds."""

    workload: str
    num_requests: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    seed: int
    length_scale: float
    num_warmups: int
    vocab_size: int
    request_timeout: float

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency} is not at least 1")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} is below 0")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups {self.num_warmups} is below 0")
        if self.vocab_size < 1:
            raise ConfigError(f"--vocab-size {self.vocab_size} is not at least 1")
        if not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout {self.request_timeout:g} is not above 0 s")


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that is already there; `base_url` has no `/v1`, and `model` None takes its first."""

    base_url: str
    model: str | None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One `loong bench`: a run against `server`, or one for each policy if the server is ours to start."""

    server: ServerConfig | ExternalServer
    policies: tuple[str, ...]
    load: LoadConfig
    slo: SLORule
    output_dir: Path | None
    api_key: str | None = field(repr=False)

    def __post_init__(self) -> None:
        if not self.policies or "" in self.policies:
            raise ConfigError("--policy needs one name or several with commas, such as esp,static-sp")
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"--policy {','.join(self.policies)} names a policy twice")
