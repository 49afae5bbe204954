"""What `loong bench` was asked to do, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from loong.core.errors import ConfigError
from loong.launcher.embedded import ServerConfig
from loong.workloads.slo import SLORule


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What is sent. `request_rate` is in requests a second, `request_timeout` in seconds.

    `burstiness` is None where a trace is replayed, at this mean rate.
    """

    workload: str
    num_requests: int
    request_rate: float
    burstiness: float | None
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


Server: TypeAlias = ServerConfig | ExternalServer


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One `loong bench`: a run for each of `servers`, which are named by policy, or by URL if not ours."""

    servers: Mapping[str, Server]
    load: LoadConfig
    slo: SLORule
    output_dir: Path | None
    api_key: str | None = field(repr=False)
