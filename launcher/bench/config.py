"""The checked configuration of `loong bench`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import TypeAlias

from loong.core.errors import ConfigError
from loong.runs.peer_server import PeerServer
from loong.runs.spawned_server import ServerConfig
from loong.workloads.client.backends import ServerApi
from loong.workloads.metrics.backlog import WorkOf
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.pareto import Devices
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import endless_workload, make_workload


@dataclass(frozen=True, slots=True)
class BenchLoadConfig:
    """The load at each of `rates` (requests a second): a number of requests, or the arrivals of `duration` s.

    `burstiness` is None where a trace is replayed, at this mean rate; `request_timeout` is in seconds;
    `extra_body` holds further fields of each request.
    """

    workload: str
    num_requests: int | None
    duration: float | None
    rates: tuple[float, ...]
    burstiness: float | None
    max_concurrency: int | None
    seed: int
    length_scale: float
    output_scale: float | None
    num_warmups: int
    vocab_size: int
    request_timeout: float
    extra_body: Mapping[str, object] = field(default_factory=dict)

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
        if self.duration is not None and max(self.rates) == inf:
            raise ConfigError(f"--duration {self.duration:g} needs a --request-rate that is not inf")

    def requests(self, rate: float, repeat: int) -> list[WorkloadRequest]:
        """Return the requests to send at a rate; each repetition has a seed of its own.

        Raises `ConfigError` if there is nothing to send, or a file has fewer requests.
        """
        if self.num_requests is not None:
            return make_workload(
                self.workload,
                self.num_requests,
                seed=self.seed + repeat,
                request_rate=rate,
                burstiness=self.burstiness,
                length_scale=self.length_scale,
                output_scale=self.output_scale,
            )
        assert self.duration is not None
        duration = self.duration
        endless = endless_workload(
            self.workload,
            seed=self.seed + repeat,
            request_rate=rate,
            burstiness=self.burstiness,
            length_scale=self.length_scale,
            output_scale=self.output_scale,
        )
        return list(takewhile(lambda request: request.arrival_time < duration, endless))


def longest_of(requests: Sequence[WorkloadRequest]) -> int:
    """Return the tokens of the longest prompt with its answer."""
    return max((request.num_prompt_tokens + request.num_output_tokens for request in requests), default=0)


def check_lengths(requests: Sequence[WorkloadRequest], max_tokens: int | None) -> None:
    """Raise `ConfigError`, with a scale that fits, if a request is longer than the servers take."""
    longest = longest_of(requests)
    if max_tokens is None or longest <= max_tokens:
        return
    divisor = 2
    while longest / divisor > max_tokens:
        divisor *= 2
    raise ConfigError(
        f"the longest request has {longest:,} tokens and the model takes {max_tokens:,}; make "
        f"--length-scale at least {divisor} times smaller, or serve with a greater --max-model-len"
    )


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that is already there; `base_url` has no `/v1`, and `model` None takes its first.

    `num_gpus` is None if it is unknown.
    """

    base_url: str
    model: str | None
    backend: ServerApi = ServerApi.OPENAI
    num_gpus: int | None = None


Server: TypeAlias = ServerConfig | ExternalServer | PeerServer


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One `loong bench`: each of `servers`, which are named by policy, or by URL or name if not ours.

    A run attains if the share `goal` of its requests meet the rule. If `is_per_class`, this must hold for
    every length class, and the backlog must be stable. It is repeated `num_repeats` times at every rate. If
    there is a `precision`, a search for the goodput chooses the rates, starting with the highest. `work_of`
    is None where no server is ours, and `devices` are of the servers of which they are known.
    """

    servers: Mapping[str, Server]
    load: BenchLoadConfig
    slo: SLORule
    output_dir: Path | None
    api_key: str | None = field(repr=False)
    goal: float = 0.9
    is_per_class: bool = False
    num_repeats: int = 1
    precision: float | None = None
    is_json_printed: bool = True
    work_of: WorkOf | None = None
    devices: Mapping[str, Devices] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()  # sentences on what was asked for as `auto`

    def __post_init__(self) -> None:
        if not 0 < self.goal <= 1:
            raise ConfigError(f"--attainment {self.goal * 100:g} is not above 0 and at most 100")
        if self.is_per_class and self.load.duration is not None:
            raise ConfigError("--per-class sends the same requests at every rate; give no --duration")
        if self.precision is not None and max(self.load.rates) == inf:
            raise ConfigError("--find-goodput needs a --request-rate to begin with")

    @property
    def is_single(self) -> bool:
        """Return whether each server is measured at one rate."""
        return self.precision is None and len(self.load.rates) == 1
