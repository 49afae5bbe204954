"""The server that each policy of a benchmark is measured on, all checked before the first is started."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.launcher.config_file import apply_config_file
from loong.runs.spawned_server import ServerConfig
from loong.scheduler.policy import admissible_tokens, policy_kind


def servers_by_policy(policies: Sequence[str], server: ServerConfig) -> dict[str, ServerConfig]:
    """Return the server of each policy: `server`, or one instance of all its devices.

    Raises:
        ConfigError: a policy cannot run on such a server.
    """
    return {policy: _server_of(policy, server) for policy in policies}


def _server_of(policy: str, server: ServerConfig) -> ServerConfig:
    if policy_kind(policy).max_instances == 1 < server.num_instances:
        server = _as_one_instance(policy, server)
    instances = (
        ElasticInstance(i, server.tensor_parallel_size, InstanceKind.FULL, kv_capacity=1)
        for i in range(server.num_instances)
    )
    admissible_tokens(policy, tuple(instances))
    return server


def _as_one_instance(policy: str, server: ServerConfig) -> ServerConfig:
    """Return a server with the same processes and the same KV in one instance."""
    from loong.hardware.memory import fit_kv_capacity  # these import torch, which others do without
    from loong.model.shapes import find_config
    from loong.model.sources.source import find_source
    from loong.model.tensor_parallel import Shard

    arguments = serve_arguments(policy, server)
    dtype = None if arguments.dtype == "auto" else arguments.dtype
    source = find_source(arguments.model, arguments.load_format, arguments.revision)
    model = find_config(
        source.model, arguments.load_format, dtype, arguments.quantization, arguments.kv_cache_dtype
    )
    size = server.num_instances * server.tensor_parallel_size
    try:
        Shard(model, size=size)
    except ConfigError as error:
        raise ConfigError(
            f"policy {policy} runs 1 instance, which would take all {size} processes; {error}"
        ) from error
    one = replace(server, num_instances=1, tensor_parallel_size=size)
    if arguments.kv_cache_tokens is None and arguments.device != "cpu":
        return one  # it fills the memory of all its devices, as the others do
    num_tokens = server.num_instances * fit_kv_capacity(
        model, server.num_instances, arguments.kv_cache_tokens
    )
    return replace(one, extra_arguments=(*server.extra_arguments, "--kv-cache-tokens", str(num_tokens)))


def serve_arguments(policy: str, server: ServerConfig) -> argparse.Namespace:
    """Return the parsed arguments of `loong serve`; exit with an error if it would refuse them."""
    from loong.launcher.cli import build_parser  # which imports this

    parser, commands = build_parser(["serve"])
    words = server.arguments(policy)
    apply_config_file(commands["serve"], words)
    return parser.parse_args(words)
