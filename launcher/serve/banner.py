"""Log lines of a server that has started."""

import logging

from loong.engine.client import EngineLimits
from loong.grammar.availability import ARE_REFUSED, NOT_INSTALLED, is_installed
from loong.launcher.serve.config import ServeConfig
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.formats import choose_format

logger = logging.getLogger(__name__)


def log_missing_grammars() -> None:
    """Log that no answer can be held to a schema if xgrammar is not installed.

    The check does not import xgrammar, which takes a second. The first request that needs it imports it and
    shows other failures.
    """
    if not is_installed():
        logger.warning("%s: %s", ARE_REFUSED, NOT_INSTALLED)


def log_call_format(tokenizer: Tokenizer, parser: str | None) -> None:
    """Log how tool calls are read. Raises `ConfigError` for a parser that does not fit the model."""
    template = tokenizer.tool_template
    form = choose_format(template, parser)
    if template is None:
        return
    if form is None:
        logger.warning(
            "tools are refused: the chat template's format is not known; --tool-call-parser names one"
        )
    else:
        why = "--tool-call-parser" if parser else "by the chat template"
        if not template.knows_tools:
            why = "for a chat template without tools: the system message describes them"
        logger.info("tool calls are read by the parser %s (%s)", form.name, why)


def log_banner(config: ServeConfig, limits: EngineLimits, port: int) -> None:
    """Log the capacity and the address of the server."""
    cluster, longest = config.cluster, min(limits.max_model_len, limits.max_request_kv)
    memory = cluster.memory_numbers
    total = cluster.kv_capacity * cluster.num_instances + memory.kv_capacity * memory.num_instances
    logger.info(
        "policy %s; KV room for %s tokens on each of %d instances, %s in all; "
        "requests of up to %s tokens, of which %s fit at once; prefix caching %s",
        config.policy_name,
        f"{cluster.kv_capacity:,}",
        cluster.num_instances,
        f"{total:,}",
        f"{longest:,}",
        f"{total // longest:,}",
        "on" if config.keeps_prefixes else "off",
    )
    if memory.num_instances:
        logger.info(
            "of these, %s tokens on each of %d memory instances, which attend without weights",
            f"{memory.kv_capacity:,}",
            memory.num_instances,
        )
    if cluster.windows is not None:
        logger.info(
            "layers with a window have KV of %s tokens on each instance, of up to %d long requests at a time",
            f"{cluster.windows.capacity:,}",
            cluster.windows.most_requests,
        )
    if cluster.host_kv_capacity:
        logger.info(
            "KV room for %s more tokens of each in memory of the host", f"{cluster.host_kv_capacity:,}"
        )
    host = config.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("serving %s on %s", ", ".join(config.server.served_model_names), address)
    logger.info("what it does is shown on %s/dashboard", address)
