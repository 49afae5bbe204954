"""What the server says of itself once it is up."""

import logging
from typing import TYPE_CHECKING

from loong.grammar.availability import import_failure
from loong.server.engine_client import EngineLimits

if TYPE_CHECKING:
    from loong.launcher.serving import ServeConfig

logger = logging.getLogger(__name__)


def log_missing_grammars() -> None:
    """Log that no answer can be held to a schema, if so; takes a second, as xgrammar is imported."""
    if (failure := import_failure()) is not None:
        logger.warning("response_format json_object and json_schema are refused: %s", failure)


def log_banner(config: "ServeConfig", limits: EngineLimits, port: int) -> None:
    """Log how much there is room for, and where to find the server."""
    cluster, longest = config.cluster, limits.max_model_len
    total = cluster.kv_capacity * cluster.num_instances
    logger.info(
        "policy %s; KV room for %s tokens on each of %d instances, %s in all; "
        "requests of up to %s tokens, of which %s fit at once",
        config.policy_name,
        f"{cluster.kv_capacity:,}",
        cluster.num_instances,
        f"{total:,}",
        f"{longest:,}",
        f"{total // longest:,}",
    )
    host = config.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("serving %s on %s", config.server.served_model_name, address)
    logger.info("what it does is shown on %s/dashboard", address)
