"""The longest request and the capacity of a benchmark's servers, found before any measurement."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.hardware.machine import num_processors
from loong.launcher.bench.chosen_load import Served
from loong.launcher.bench.config import BenchConfig, ExternalServer
from loong.launcher.bench.measured_server import MeasuredServer
from loong.launcher.bench.policies import serve_arguments
from loong.runs.background_load import NOTABLE_SHARE, processor_time, share_of_others
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.scheduler.policy import admissible_tokens
from loong.simulation.capacity import POLICY, predicted_capacity
from loong.simulation.cluster import SimulatedCluster, unloaded_work
from loong.simulation.config import Host
from loong.workloads.client.backends import ServerApi
from loong.workloads.client.scrape import ServedModel
from loong.workloads.report.pareto import Devices, DeviceUnit
from loong.workloads.request import RequestShape

if TYPE_CHECKING:
    from loong.launcher.serve.config import ServeConfig

LEAST_FREE = 0.25  # processors, however much other work there is: we get our share of it
NUM_FOR_LENGTHS = 16  # requests, of evenly spaced lengths, that measure the capacity at one of many scales
NUM_FOR_RATE = 48  # the same at the chosen scale, where one measurement decides the rate


def served_by(config: BenchConfig) -> Served:
    """Return the longest request that all servers take, and the capacity of the first.

    Raises:
        ConfigError: a server of ours could not start.
        ServerUnusableError: a server that is there does not answer, refuses the key or lacks the model.
    """
    ours = {name: server for name, server in config.servers.items() if isinstance(server, ServerConfig)}
    if ours:
        return served_by_ours(ours, config)
    there = {name: server for name, server in config.servers.items() if isinstance(server, ExternalServer)}
    return _served_by_others(there, config) if there else Served(None, _unknown_capacity, "")


def served_by_ours(servers: Mapping[str, ServerConfig], bench: BenchConfig) -> Served:
    """Return the longest request of the servers to be started, and the expected capacity of the first.

    No cost model knows how fast this machine's processors are, so there the rate's capacity is measured.
    """
    before = processor_time()
    from loong.launcher.serve.command import serve_config  # these take a moment
    from loong.launcher.serve.config import engine_limits, served_cost_model

    configs = [serve_config(serve_arguments(policy, server)) for policy, server in servers.items()]
    limits = [engine_limits(config) for config in configs]
    first = configs[0]
    instances = first.cluster.instances
    cost_model = served_cost_model(first, limits[0])
    cluster = SimulatedCluster(instances, cost_model, admissible_tokens(POLICY, instances))
    others = share_of_others(before, processor_time()) or 0.0
    num_free = num_processors() * (1 - others) if others > NOTABLE_SHARE else num_processors()
    is_on_cpu = first.device == "cpu"
    host = Host(max(num_free, LEAST_FREE) if is_on_cpu else inf)
    name, server = next(iter(servers.items()))
    return Served(
        min(min(limit.max_model_len, limit.max_request_kv + 1) for limit in limits),
        lambda shapes: predicted_capacity(cluster, shapes, host, keeps_prefixes=first.keeps_prefixes),
        f"{name} was measured to have" if is_on_cpu else "the cost model predicts",
        partial(_capacity_of_new_server, name, server, bench) if is_on_cpu else None,
        unloaded_work(cost_model, server.tensor_parallel_size),
        {name: _devices_of(config) for name, config in zip(servers, configs, strict=True)},
    )


def _devices_of(config: "ServeConfig") -> Devices:
    """Return the devices of all instances, memory instances included."""
    number = sum(instance.tp_size for instance in config.cluster.instances)
    return Devices(number, DeviceUnit.of_device(config.device))


def _unknown_capacity(_: Sequence[RequestShape]) -> float:
    raise ConfigError(
        "--length-scale and --request-rate are not chosen for --peer alone; give both, or a --policy as well"
    )


def _capacity_of_new_server(
    name: str, server: ServerConfig, config: BenchConfig, shapes: Sequence[RequestShape]
) -> float:
    """Return the capacity of a server that is started only to measure it."""
    with (
        TemporaryDirectory() as folder,
        spawn_server(server, name, Path(folder) / "server.log") as base_url,
    ):
        return _capacity(name, MeasuredServer(base_url, None, config, ServerApi.OPENAI), NUM_FOR_RATE, shapes)


def _served_by_others(external: Mapping[str, ExternalServer], config: BenchConfig) -> Served:
    servers = {name: _measured(server, config) for name, server in external.items()}
    models = asyncio.run(_models(list(servers.values())))
    known = [model.max_model_len for model in models if model.max_model_len is not None]
    name, first = next(iter(servers.items()))

    return Served(
        min(known, default=None),
        partial(_capacity, name, first, NUM_FOR_LENGTHS),
        f"{name} was measured to have",
        partial(_capacity, name, first, NUM_FOR_RATE),
    )


def _capacity(name: str, server: MeasuredServer, number: int, shapes: Sequence[RequestShape]) -> float:
    """Return what a server completes of `number` shapes like these, sent at once."""
    print(f"Measuring the capacity of {name} ...", file=sys.stderr)
    ordered = sorted(shapes, key=lambda shape: sum(run.num_tokens for run in shape.prompt))
    places = [len(ordered) * (2 * i + 1) // (2 * number) for i in range(number)]
    return asyncio.run(server.capacity([ordered[place] for place in places]))


def _measured(server: ExternalServer, config: BenchConfig) -> MeasuredServer:
    return MeasuredServer(server.base_url, server.model, config, server.backend)


async def _models(servers: Sequence[MeasuredServer]) -> list[ServedModel]:
    return [await server.find_model() for server in servers]
