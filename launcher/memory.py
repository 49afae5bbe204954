"""How much KV fits the memory of this machine."""

from math import prod
from pathlib import Path

from loong.core.errors import ConfigError
from loong.model.config import DTYPE_BYTES, ModelConfig
from loong.model.parameters import expected_shapes

MEMORY_SHARE = 0.5  # of what is available: activations, processes and the rest of the machine need theirs
MAX_AUTO_TOKENS = 65536  # an instance; more room than that is better asked for
GIB = 2**30


def fit_kv_capacity(config: ModelConfig, num_instances: int, asked: int | None) -> int:
    """Tokens of KV an instance: those asked for, or (None) as many as memory suggests.

    Raises `ConfigError` if they cannot fit beside the weights of every instance.
    """
    weights = DTYPE_BYTES[config.dtype] * sum(map(prod, expected_shapes(config).values()))
    available = _available_bytes()
    room = MEMORY_SHARE * available / num_instances - weights
    suggested = min(int(room // config.kv_bytes_per_token), MAX_AUTO_TOKENS)
    tokens = suggested if asked is None else asked
    needed = num_instances * (weights + tokens * config.kv_bytes_per_token)
    if tokens < 1 or needed > available:
        raise ConfigError(
            f"{num_instances} instances with {weights / GIB:.2f} GiB of weights and KV for "
            f"{max(tokens, 1):,} tokens each need {needed / GIB:.2f} GiB, "
            f"but {available / GIB:.2f} GiB are available; "
            "lower --num-instances or --kv-cache-tokens"
        )
    return tokens


def _available_bytes() -> int:
    """What the kernel thinks could be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not tell MemAvailable; give --kv-cache-tokens")
