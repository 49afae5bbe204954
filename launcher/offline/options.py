"""Keyword arguments of `LLM` as the configuration of `loong serve`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.core.similar_words import meant
from loong.launcher.cli import build_parser
from loong.launcher.config_file import set_values
from loong.launcher.parser import CommandParser

if TYPE_CHECKING:
    from loong.launcher.serve.config import ServeConfig

_SOURCE = "LLM"
_GROUPS = ("model", "cluster", "scheduling")  # of the flags of `loong serve`
_RECORDS = ("start_timeout", "decision_log", "event_log", "event_log_prompts")
_OF_ANSWERS = ("model", "served_model_name", "accept_any_model")
_DEFAULTS = {"num_instances": 1, "target_ttft": "none", "target_tpot": "none"}


def offline_config(model: str | None, options: Mapping[str, object]) -> "ServeConfig":
    """Return the configuration that keyword arguments give. One that is None has its default.

    Without a device, it is `cuda` where there are GPUs. There is one instance and no latency target unless
    the options say so. Raises `ConfigError`, which names an unknown or wrong option.
    """
    parser, commands = build_parser(["serve"])
    serve = commands["serve"]
    given = {name: value for name, value in options.items() if not _asks_for_nothing(serve, name, value)}
    _check_names(serve, given)
    set_values(serve, {"device": _device()} | _DEFAULTS | given, _SOURCE)
    words = ["serve"] if model is None else ["serve", model]
    from loong.launcher.serve.command import serve_config  # takes a moment
    from loong.model.sources.source import check_name

    args = parser.parse_args(words)
    check_name(args.model, args.load_format)
    return serve_config(args)


def _asks_for_nothing(serve: CommandParser, name: str, value: object) -> bool:
    """Return whether an option is at its default, or turns off what another engine has and loong has not."""
    is_foreign = serve.elsewhere is not None and serve.elsewhere(f"--{name.replace('_', '-')}") is not None
    return value is None or (value is False and is_foreign)


def _check_names(serve: CommandParser, given: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an option that `LLM` does not have."""
    groups = serve.groups
    known = [action.dest for title in _GROUPS for action in groups[title]] + list(_RECORDS)
    known = [name for name in known if name not in _OF_ANSWERS]
    for name in given:
        if name in known:
            continue
        place = serve.elsewhere(f"--{name.replace('_', '-')}") if serve.elsewhere is not None else None
        raise ConfigError(f"{_SOURCE}: there is no option {name!r}{place or meant(name, known)}")


def _device() -> str:
    from loong.hardware.gpus import host_gpus  # takes a moment

    try:
        host_gpus()
    except ConfigError:
        return "cpu"
    return "cuda"
