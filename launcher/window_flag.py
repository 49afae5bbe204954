"""The flag for the memory of layers with a window, for commands that start or simulate instances."""

import argparse
from collections.abc import Iterable
from typing import NamedTuple

from loong.core.errors import ConfigError
from loong.core.window_memory import WindowMemory
from loong.launcher.flags import token_count

_POLICY = "esp"  # others may compute more at a time than layers with a window have room for


class WindowLayers(NamedTuple):
    """The layers of a model, those of them that have a window, and the largest window."""

    num_layers: int
    num_window_layers: int
    largest_window: int


def add_window_flag(group: argparse._ArgumentGroup, where: str) -> None:
    """Add the flag. `where` says what else it needs."""
    group.add_argument(
        "--window-kv-tokens",
        type=token_count,
        metavar="N",
        help="tokens of KV on each instance in layers with a sliding window, which leaves more memory for "
        f"others; {where} (as many as others have)",
    )


def window_memory(
    num_tokens: int, layers: WindowLayers, policies: Iterable[str], num_batched_tokens: int
) -> WindowMemory:
    """Return the memory of layers with a window, if steps of all instances compute `num_batched_tokens`.

    Raises `ConfigError` if a model has no such layers or only such, or a policy or the size is not supported.
    """
    num_layers, num_window_layers, window = layers
    if not 0 < num_window_layers < num_layers:
        raise ConfigError(
            f"--window-kv-tokens is for models that have layers with and without a window; "
            f"{num_window_layers} of {num_layers} have one"
        )
    if others := [policy for policy in policies if policy != _POLICY]:
        raise ConfigError(f"--window-kv-tokens needs --policy {_POLICY}, but it is {', '.join(others)}")
    least = 2 * (num_batched_tokens + window)
    if num_tokens < least:
        raise ConfigError(
            f"--window-kv-tokens is {num_tokens}; it needs {least} at least, for two steps of all instances "
            f"and a request's window. A smaller --max-num-batched-tokens needs less"
        )
    return WindowMemory.of(window, num_tokens, num_batched_tokens)
