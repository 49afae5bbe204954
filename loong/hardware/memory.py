"""Finds how much KV fits the memory of this machine, or of its GPUs."""

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.errors import ConfigError
from loong.core.instance import MAX_SERVED_LEASES, MAX_SERVED_LISTS, MAX_SERVED_TOKENS
from loong.core.kv_layout import KVLayout
from loong.hardware.gpus import Gpu
from loong.model.config import DTYPE_BYTES, ModelConfig
from loong.model.quantization.config import Method
from loong.model.tensor_shapes import expected_shapes, is_quantized

MEMORY_SHARE = 0.5  # of available memory; the rest is for activations and other processes
LEAST_KV_TOKENS = 1024  # of an instance, for which a smaller --num-instances is proposed
MAX_AUTO_TOKENS = 65536  # an instance; more room than that is better asked for
GIB = 2**30
CHANNEL_BYTES_A_PEER = 2**28  # of a GPU, for tensors that a peer sends when the host launches a step
MAILBOX_ROWS = 8704  # that an instance sends in captured steps, of all sizes
LIST_BYTES_A_TOKEN = 8 * MAX_SERVED_LISTS * (1 + MAX_SERVED_LEASES)  # of its slots, in leases at a time
_SCALE_BYTES = 4
MOST_DECODES = 512  # of an instance alone, in a captured step
GRAPH_BYTES = 4 * GIB  # for captured steps, and to draw from the logits of 512 requests


def fit_kv_capacity(
    config: ModelConfig,
    num_instances: int,
    asked: int | None,
    num_memory: int = 0,
    memory_tokens: int = 0,
    window_tokens: int | None = None,
) -> int:
    """Return the tokens of KV an instance: those asked for, or (None) as many as memory suggests.

    Of `num_memory` memory instances, each has `memory_tokens`, or (0) as many as the others, and no weights.
    Layers with a window have KV of `window_tokens` on each, or (None) of as many as the others.
    Raises `ConfigError` if they do not fit together with the weights of every instance.
    """
    weights, available = weight_bytes(config), _available_bytes()
    layout = config.kv_layout()
    token_bytes = layout.bytes_per_token
    if window_tokens is not None:
        token_bytes -= layout.window_bytes_per_token
        available -= (num_instances + num_memory) * window_tokens * layout.window_bytes_per_token
    available -= num_memory * memory_tokens * token_bytes
    room = int(max(0, available) * (MEMORY_SHARE if asked is None else 1))
    num_pools = num_instances if memory_tokens else num_instances + num_memory
    fitting = (room - num_instances * weights) // (num_pools * token_bytes)
    tokens = min(fitting, MAX_AUTO_TOKENS) if asked is None else asked
    if not 1 <= tokens <= fitting:
        needs, has = f"{_gib(weights)} of weights", f"{_gib(room)} are available"
        if asked is None:
            has += f", half of the {_gib(available)} that are; the rest is for activations"
        else:
            needs += f" and {_gib(asked * token_bytes)} of KV for {asked:,} tokens"
        raise ConfigError(
            f"--num-instances {num_instances} does not fit this machine's memory: each needs {needs}, "
            f"and {has}. {_what_fits(config, weights, room, fitting)}"
        )
    return tokens


def fit_host_kv_capacity(
    config: ModelConfig, num_instances: int, asked: int | None, num_tokens_here: int | None
) -> int:
    """Return the tokens of KV an instance in memory of the host: `asked`, or what fits half of what is left.

    On CPUs instances have weights and `num_tokens_here` of KV in the same memory; None stands for GPUs.
    Raises `ConfigError` if they do not fit.
    """
    available, token_bytes = _available_bytes(), config.kv_layout().bytes_per_token
    if num_tokens_here is not None:
        available -= num_instances * (weight_bytes(config) + num_tokens_here * token_bytes)
    share = MEMORY_SHARE if asked is None else 1
    fitting = int(available * share) // num_instances // token_bytes
    tokens = fitting if asked is None else asked
    if not 1 <= tokens <= fitting:
        least = max(1, tokens)
        raise ConfigError(
            f"--host-kv-tokens needs {_gib(num_instances * least * token_bytes)} of this host's memory for "
            f"{least:,} tokens of each of {num_instances} instances, and {_gib(max(0, available))} are left"
            f"{f'; {fitting} would fit' if fitting >= 1 else ''}"
        )
    return tokens


def _what_fits(config: ModelConfig, weights: int, room: int, num_tokens: int) -> str:
    """Return how to fit the memory: with less KV, fewer instances, or another model."""
    if num_tokens >= 1:
        return f"--kv-cache-tokens {num_tokens} would fit, or a smaller --num-instances"
    num_fitting = room // (weights + LEAST_KV_TOKENS * config.kv_layout().bytes_per_token)
    if num_fitting >= 1:
        return f"--num-instances {num_fitting} would fit"
    return "Not one instance fits: serve a smaller model, or this one on GPUs"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


class ClusterSize(NamedTuple):
    """The instances of a cluster, the ranks of each, and the hosts that they are spread over."""

    num_instances: int
    tp_size: int
    num_hosts: int = 1

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of all hosts, one for each rank."""
        return self.num_instances * self.tp_size

    @property
    def most_of_a_host(self) -> int:
        """Return the GPUs that are needed on the host with most instances."""
        return -(-self.num_instances // self.num_hosts) * self.tp_size


def fit_gpu_kv_capacity(
    config: ModelConfig,
    gpus: Sequence[Gpu],
    size: ClusterSize,
    asked: int | None,
    utilization: float,
    graph_limits: CudaGraphLimits,
    *,
    keeps_fp8: bool = False,
    has_weights: bool = True,
    memory_tokens: int = 0,
) -> int:
    """Return the tokens of KV an instance: `asked`, or what fits `utilization` of free GPU memory.

    The rest is for activations. `gpus` are those of this host, and other hosts are taken to have the same.
    All lists of slots have room for those of a memory instance with `memory_tokens`.
    Raises `ConfigError` if there are too few GPUs, or weights and KV do not fit.
    """
    num_instances, tp_size, num_hosts = size
    if size.most_of_a_host > len(gpus):
        on_hosts = f" on {num_hosts} hosts" if num_hosts > 1 else ""
        raise ConfigError(
            f"--num-instances is {num_instances}{on_hosts} and --tensor-parallel-size {tp_size}, "
            f"but this host has {len(gpus)} GPUs"
        )
    weights = weight_bytes(config, keeps_fp8=keeps_fp8) // tp_size if has_weights else 0
    layout = config.kv_layout(tp_size)
    reserved = GRAPH_BYTES + arena_bytes(config, size) + window_list_bytes(layout, num_instances)
    lists_a_token = LIST_BYTES_A_TOKEN * (1 + 2 * len(_windows(layout)))  # with positions for windows
    room = int(utilization * min(gpu.free_bytes for gpu in gpus[: size.most_of_a_host]))

    def needed(tokens: int) -> int:
        copied = graph_limits.num_copied(num_instances * tokens)  # of a layer, in captured steps
        lists = max(tokens, memory_tokens) * lists_a_token
        return weights + reserved + tokens * layout.bytes_per_token + copied * layout.row_bytes + lists

    fitting = bisect_right(range(1, room // layout.bytes_per_token), room, key=needed)
    tokens = fitting if asked is None else asked
    if tokens < 1 or needed(tokens) > room:
        needs = f"{_gib(weights)} of weights, {_gib(reserved)} for captured steps and what others send"
        has = f"{_gib(room)}, which is --gpu-memory-utilization {utilization:g} of what is free"
        if asked is not None:
            needs += f", and {_gib(needed(asked) - weights - reserved)} of KV for {asked:,} tokens"
            has += f"; --kv-cache-tokens {fitting} would fit" if fitting >= 1 else ""
        raise ConfigError(f"a GPU needs {needs}. It has {has}")
    return tokens


def arena_bytes(config: ModelConfig, size: ClusterSize) -> int:
    """Return the bytes of a GPU for what all others send: its channels and mailboxes, at most."""
    row_bytes = config.mailbox_row_bytes(size.tp_size)
    return CHANNEL_BYTES_A_PEER * size.num_gpus + MAILBOX_ROWS * row_bytes * size.num_instances


def window_list_bytes(layout: KVLayout, num_instances: int) -> int:
    """Return the bytes of lists of the keys in the windows of all queries, in leases at a time."""
    num_queries = max(MOST_DECODES, num_instances * MAX_SERVED_TOKENS)
    return 16 * sum(_windows(layout)) * num_queries * (1 + MAX_SERVED_LEASES)


def _windows(layout: KVLayout) -> list[int]:
    return [window for window in layout.windows if window is not None]


def weight_bytes(config: ModelConfig, *, keeps_fp8: bool = False) -> int:
    """Return the bytes that all weights of a model take in its dtype, or in FP8 where that is kept."""
    shapes, element_bytes = expected_shapes(config), DTYPE_BYTES[config.dtype]
    if not keeps_fp8 or config.quantization is None or config.quantization.method is not Method.FP8:
        return element_bytes * sum(map(prod, shapes.values()))
    width = None if config.quantization.block is None else config.quantization.block[1]
    return sum(
        prod(shape) + _SCALE_BYTES * shape[0] * (-(-shape[1] // width) if width else 1)
        if is_quantized(name)
        else element_bytes * prod(shape)
        for name, shape in shapes.items()
    )


def _available_bytes() -> int:
    """Return the kernel's estimate of the memory that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not report MemAvailable; give --kv-cache-tokens")
