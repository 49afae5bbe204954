"""The Ray cluster on whose nodes hosts are: an existing one, or one that this process starts."""

import logging
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loong.core.errors import ClusterError, ConfigError
from loong.processes.child import STOP_SIGNALS

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

_KINDS = {"CPU": "processors", "GPU": "GPUs"}  # of what Ray counts
_LEAST_SHARE = 0.001  # of the resource that each node has of its own name
_DRIVER = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}  # it would take the signals that stop a server
_MODE = "RAY_AUTH_MODE"
_OWN_CLUSTER = {_MODE: "token", "RAY_USAGE_STATS_ENABLED": "0"}  # Ray listens on all interfaces


def check_ray() -> None:
    """Raise `ConfigError` unless Ray is installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "--hosts ray needs Ray, which is not installed; `pip install '.[ray]'` in its folder"
        )


def set_environment() -> None:
    """Set what Ray reads when it is imported, unless the user has set it."""
    variables = _DRIVER if "RAY_ADDRESS" in os.environ else {**_DRIVER, **_OWN_CLUSTER}
    os.environ.update({name: value for name, value in variables.items() if name not in os.environ})


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Connect to the cluster of RAY_ADDRESS, or start one on this node. Yield this node's IP address.

    A cluster that is started here ends with this process, and other nodes need its token to join.
    """
    import ray  # not at the top: it is optional, and needs `set_environment` before

    is_own = "RAY_ADDRESS" not in os.environ
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        ray.init(address="local" if is_own else None, namespace="loong", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"Ray: {error}") from error
    finally:
        for number, handler in handlers.items():  # Ray's would exit at once
            signal.signal(number, handler)
    try:
        context = ray.get_runtime_context()
        warn_if_open(context.gcs_address)
        if is_own:
            logger.info(
                "started Ray; on other hosts run `RAY_AUTH_MODE=token ray start --address=%s`, after "
                "~/.ray/auth_token was copied there",
                context.gcs_address,
            )
        yield ray.util.get_node_ip_address()
    finally:
        ray.shutdown()


@contextmanager
def shared_ray_cluster() -> Iterator[None]:
    """Start a cluster for processes that are started meanwhile, unless RAY_ADDRESS names one."""
    set_environment()
    if "RAY_ADDRESS" in os.environ:
        yield
        return
    import ray

    with ray_cluster():
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        try:
            yield
        finally:
            del os.environ["RAY_ADDRESS"]


def warn_if_open(address: str) -> None:
    """Warn if a cluster runs the code of all who reach it. Ray sets its mode when it finds a token."""
    if os.environ.get(_MODE, "").lower() != "token":
        logger.warning(
            "the Ray cluster at %s needs no token: all who reach its ports may run code on its nodes; set "
            "%s=token on each",
            address,
            _MODE,
        )


def bundles_of(num_workers: list[int], head_address: str, *, has_gpus: bool) -> list[dict[str, float]]:
    """Return what each host needs: a processor, and maybe a GPU, for each worker. The first is the head."""
    kinds = ("CPU", "GPU") if has_gpus else ("CPU",)
    bundles = [dict.fromkeys(kinds, float(number)) for number in num_workers]
    bundles[0][f"node:{head_address}"] = _LEAST_SHARE
    return bundles


def reserve(bundles: list[dict[str, float]], timeout: float, name: str) -> "PlacementGroup":
    """Reserve a node for each bundle, by a name that nothing else in the cluster has.

    Raises `ClusterError` if Ray has too few within `timeout` seconds.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(bundles, strategy="STRICT_SPREAD", name=name)
    if not group.wait(timeout):
        remove_placement_group(group)
        kinds = {kind: name for kind, name in _KINDS.items() if kind in bundles[0]}
        nodes = [_described(node, kinds) for node in ray.nodes() if node["Alive"]]
        needed = " and ".join(
            f"{[int(bundle[kind]) for bundle in bundles]} free {name}" for kind, name in kinds.items()
        )
        raise ClusterError(
            f"Ray found no {len(bundles)} nodes with {needed} within {timeout:g} s; "
            f"its nodes have {', '.join(nodes)}"
        )
    return group


def _described(node: dict[str, Any], kinds: Collection[str]) -> str:  # Any: Ray's own
    numbers = " and ".join(f"{node['Resources'].get(kind, 0):g}" for kind in kinds)
    return f"{numbers} at {node['NodeManagerAddress']}"
