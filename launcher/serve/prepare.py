"""The parts of a server that need no worker."""

from dataclasses import dataclass

from loong.engine.client import EngineLimits
from loong.launcher.serve.banner import log_call_format
from loong.launcher.serve.config import ServeConfig, engine_limits, served_cost_model
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.server.text.chat_renderer import try_templates
from loong.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts of an engine that need no worker. Plans begin with the cost model `prior`."""

    config: ServeConfig
    limits: EngineLimits
    policy: Policy
    prior: WorkCostModel


def prepare(config: ServeConfig) -> Prepared:
    """Return the parts that need no worker. Raises `ConfigError` if the engine could not work with them."""
    limits = engine_limits(config)
    policy = make_policy(config.policy_name, config.policy)
    prior = served_cost_model(config, limits)
    config.logs.check()
    return Prepared(config, limits, policy, prior)


async def tried_tokenizer(config: ServeConfig) -> Tokenizer:
    """Return the tokenizer of those that answer clients. Raises `ConfigError` if a template cannot work."""
    tokenizer = Tokenizer.from_folder(config.tokenizer_folder, config.model.eos_token_ids)
    tokenizer.make_ahead()
    await try_templates({tokenizer.chat_template, tokenizer.tool_template})
    log_call_format(tokenizer, config.server.tool_call_parser)
    return tokenizer
