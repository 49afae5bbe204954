"""The server that each policy of a benchmark is measured on, all checked before the first is started."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.launcher import serve
from loong.launcher.embedded import ServerConfig
from loong.scheduler.policy import POLICIES, admissible_tokens


def servers_by_policy(policies: Sequence[str], server: ServerConfig) -> dict[str, ServerConfig]:
    """Return what to start for each policy: `server`, or all of it as one instance where one is all it runs.

    Raises:
        ConfigError: a name is unknown or given twice, or a policy cannot run on such a server.
    """
    if "" in policies:
        raise ConfigError("--policy needs one name or several with commas, such as esp,static-sp")
    if len(set(policies)) < len(policies):
        raise ConfigError(f"--policy {','.join(policies)} names a policy twice")
    return {policy: _server_of(policy, server) for policy in policies}


def _server_of(policy: str, server: ServerConfig) -> ServerConfig:
    if policy in POLICIES and POLICIES[policy].max_instances == 1 < server.num_instances:
        server = _as_one_instance(policy, server)
    instances = (
        ElasticInstance(i, server.tensor_parallel_size, InstanceKind.FULL, kv_capacity=1)
        for i in range(server.num_instances)
    )
    admissible_tokens(policy, tuple(instances))
    return server


def _as_one_instance(policy: str, server: ServerConfig) -> ServerConfig:
    """Return a server of the same processes, and as much KV, in one instance."""
    from loong.launcher.memory import (
        fit_kv_capacity,
    )  # these import torch, which other policies can do without
    from loong.model.shapes import find_config
    from loong.model.tensor_parallel import Shard
    from loong.model.tiny import CONFIG

    args = _serve_arguments(policy, server)
    dtype = None if args.dtype == "auto" else args.dtype
    model = CONFIG if args.model is None else find_config(args.model, args.load_format, dtype)
    size = server.num_instances * server.tensor_parallel_size
    try:
        Shard(model, size=size)
    except ConfigError as error:
        raise ConfigError(
            f"policy {policy} runs 1 instance, which would take all {size} processes; {error}"
        ) from error
    one = replace(server, num_instances=1, tensor_parallel_size=size)
    if args.kv_cache_tokens is None and args.device != "cpu":
        return one  # it fills the memory of all its devices, as the others do
    num_tokens = server.num_instances * fit_kv_capacity(model, server.num_instances, args.kv_cache_tokens)
    return replace(one, extra_arguments=(*server.extra_arguments, "--kv-cache-tokens", str(num_tokens)))


def _serve_arguments(policy: str, server: ServerConfig) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loong")
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(server.arguments(policy))
