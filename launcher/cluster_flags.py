"""Flags that name a model and the instances that hold it, for every command that starts workers."""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ConfigError
from loong.core.instance import MAX_SERVED_LEASES
from loong.core.kv_layout import KV_CACHE_DTYPES
from loong.core.window_memory import WindowMemory
from loong.hardware.attention_kernels import check_attention_kernels
from loong.launcher.flags import or_auto, positive, share, token_count
from loong.launcher.window_flag import WindowLayers, window_memory
from loong.model.quantization.config import FLAG_VALUES
from loong.worker.config import FABRICS

if TYPE_CHECKING:
    from loong.launcher.cluster.config import ClusterConfig
    from loong.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ChosenCluster:
    """The model and cluster that the flags name.

    A built-in shape has no tokenizer and uses the tiny model's.
    """

    name: str
    model: "ModelConfig"
    cluster: "ClusterConfig"
    device: str  # a key of DEVICES, which has an unknown GPU once it is measured
    tokenizer_folder: Path


class _OnlyModel(argparse.Action):
    """Takes a model that is not named yet."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _flag: str | None = None,
    ) -> None:
        named = getattr(namespace, self.dest, None)
        if values == self.default:  # a positional argument that is not there
            values = named or values
        elif named not in (None, self.default, values):
            raise argparse.ArgumentError(self, f"the model is {named} already, and cannot be {values}, too")
        setattr(namespace, self.dest, values)


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """Add MODEL and the flags for its weights."""
    group.add_argument(
        "model",
        nargs="?",
        action=_OnlyModel,
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, ORG/NAME of the hub, or a name that `loong models` lists "
        "(a tiny random one)",
    )
    group.add_argument(
        "--model", action=_OnlyModel, metavar="MODEL", help="the model, as a flag instead of an argument"
    )
    group.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a model of the hub (its main branch)"
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="where weights come from; dummy: random, also for built-in shapes such as llama-3.1-8b",
    )
    group.add_argument(
        "--dtype",
        type=lambda name: _DTYPES.get(name, name),
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="data type of weights and KV (the model's; of a GGUF file float32, on GPUs bfloat16)",
    )
    group.add_argument(
        "--quantization",
        choices=FLAG_VALUES,
        help="format that weights of layers get when they are loaded; fp8: a scale for each row (as they are "
        "stored)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=lambda name: _KV_DTYPES.get(name, name),
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="data type of KV; fp8: half the memory of bfloat16, with a scale for each token and head "
        "(auto: the model's)",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of random dummy weights (%(default)s)")


_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
_KV_DTYPES = {"fp8_e4m3": "fp8"}


def add_instance_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the number, device and size of the instances."""
    _add_device_flags(group)
    group.add_argument(
        "--num-instances",
        type=positive,
        default=4,
        metavar="N",
        help="number of instances, each a replica of the weights (%(default)s)",
    )
    group.add_argument(
        "--hosts",
        choices=("local", "ray"),
        default="local",
        help="where instances run; ray: on nodes of the Ray cluster at RAY_ADDRESS, else of one that is "
        "started here (%(default)s)",
    )
    group.add_argument(
        "--num-hosts",
        type=positive,
        default=1,
        metavar="N",
        help="number of --hosts ray, over which instances are spread evenly (%(default)s)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=1,
        metavar="N",
        help="ranks of each instance, each a process on a device (%(default)s)",
    )
    group.add_argument(
        "--kv-cache-tokens",
        type=or_auto(token_count),
        metavar="N",
        help="tokens of KV on each instance (auto: as many as fit into memory, on CPUs at most 65536)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=0.85,
        metavar="X",
        help="share of a GPU's free memory for weights, CUDA graphs and KV (%(default)s)",
    )


def _add_device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of each rank of each instance; cuda: one GPU for each rank (%(default)s)",
    )
    group.add_argument(
        "--fabric",
        choices=FABRICS,
        default="auto",
        help="how tensors move between the GPUs of a host, and (but for staged) by NCCL between hosts; auto: "
        "symmetric where they reach each other",
    )
    group.add_argument(
        "--attention-kernels",
        choices=tuple(kernels.value for kernels in AttentionKernels),
        default=AttentionKernels.AUTO.value,
        help="library for large tiles of prompts on GPUs, besides own kernels; auto: FlashAttention-3 where "
        "it is installed, else cuDNN; lightllm: its kernel for decodes (%(default)s)",
    )
    group.add_argument(
        "--max-served-leases",
        type=positive,
        default=MAX_SERVED_LEASES,
        metavar="N",
        help="decode leases of other instances that a GPU serves at a time, each by a stream and captured "
        "steps of its own, at most %(default)s (%(default)s)",
    )


def chosen_cluster(args: argparse.Namespace, start_timeout: float) -> ChosenCluster:
    """Find the model, fetching or making it if it is not here, and fit its KV into memory.

    Raises `ConfigError` if there is no such model, or it does not fit.
    """
    from loong.model.sources.source import find_source

    _check_hosts(args)
    check_attention_kernels(AttentionKernels(args.attention_kernels), args.device, args.kv_cache_dtype)
    from loong.launcher.cluster.config import ClusterConfig
    from loong.model.shapes import find_config  # these take a moment, which `--help` can do without

    source = find_source(args.model, args.load_format, args.revision)
    dtype = None if args.dtype == "auto" else args.dtype
    if dtype is None and source.is_gguf and args.device != "cpu":
        dtype = "bfloat16"
    config = find_config(source.model, args.load_format, dtype, args.quantization, args.kv_cache_dtype)
    windows = _window_memory(args, config)
    device, kv_capacity, memory_kv_capacity = _device_and_kv_capacities(args, config)
    return ChosenCluster(
        name=source.name,
        model=config,
        cluster=ClusterConfig(
            model=source.model,
            load_format=args.load_format,
            dtype=dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            seed=args.seed,
            num_instances=args.num_instances,
            max_instances=getattr(args, "max_instances", None),
            memory_instances=getattr(args, "memory_instances", 0),
            memory_kv_capacity=memory_kv_capacity,
            num_hosts=args.num_hosts,
            hosts=args.hosts,
            tp_size=args.tensor_parallel_size,
            kv_capacity=kv_capacity,
            windows=windows,
            start_timeout=start_timeout,
            device=args.device,
            fabric=args.fabric,
            attention_kernels=args.attention_kernels,
            max_served_leases=args.max_served_leases,
            tokenizer_folder=str(source.tokenizer_folder),
        ),
        device=device,
        tokenizer_folder=source.tokenizer_folder,
    )


def with_host_tier(chosen: ChosenCluster, asked: int | None) -> "ClusterConfig":
    """Return the cluster with `asked` tokens of KV an instance in memory of the host, or (None) what fits.

    Raises `ConfigError` if they do not fit.
    """
    from loong.hardware.memory import fit_host_kv_capacity

    cluster = chosen.cluster
    if asked == 0:
        return cluster
    most_of_a_host = -(-cluster.most_instances // cluster.num_hosts)
    used = None
    if cluster.device == "cpu":
        layout, windows = chosen.model.kv_layout(), cluster.windows
        num_spared = 0 if windows is None else cluster.kv_capacity - windows.capacity
        used = cluster.kv_capacity - num_spared * layout.window_bytes_per_token // layout.bytes_per_token
    num_tokens = fit_host_kv_capacity(chosen.model, most_of_a_host, asked, used)
    return replace(cluster, host_kv_capacity=num_tokens)


def _window_memory(args: argparse.Namespace, config: "ModelConfig") -> WindowMemory | None:
    """Return the memory of layers with a window, or None if they have as much as others.

    Raises `ConfigError` if the model has no such layers or only such, or that is not supported.
    """
    if (tokens := getattr(args, "window_kv_tokens", None)) is None:
        return None
    layout = config.kv_layout()
    most = max(args.num_instances, args.max_instances or 0) * args.max_num_batched_tokens
    layers = WindowLayers(layout.num_layers, layout.num_window_layers, layout.largest_window)
    memory = window_memory(tokens, layers, (args.policy,), most)
    if args.device != "cpu":
        raise ConfigError("--window-kv-tokens needs --device cpu: captured steps keep KV of all layers alike")
    if args.num_engines > 1 or args.lend:
        raise ConfigError("--window-kv-tokens needs one engine, which lends no room")
    return memory


def _check_hosts(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if instances cannot be spread as asked."""
    if args.hosts == "local":
        if args.num_hosts > 1:
            raise ConfigError(f"--num-hosts is {args.num_hosts}, which needs --hosts ray")
        return
    from loong.launcher.cluster.ray_cluster import check_ray  # this takes a moment

    check_ray()


def _device_and_kv_capacities(args: argparse.Namespace, config: "ModelConfig") -> tuple[str, int, int]:
    """Return the instances' device, as cost models name it, and the KV tokens each has room for.

    The second number is that of memory instances.
    """
    from loong.hardware.devices import DEVICES, keeps_fp8
    from loong.hardware.gpus import check_torch, cost_device, host_gpus
    from loong.hardware.memory import ClusterSize, fit_gpu_kv_capacity, fit_kv_capacity

    most = max(args.num_instances, getattr(args, "max_instances", None) or 0)
    num_memory, memory_tokens = getattr(args, "memory_instances", 0), getattr(args, "memory_kv_tokens", None)
    if args.device == "cpu":
        most_of_a_host, most_memory = (-(-number // args.num_hosts) for number in (most, num_memory))
        tokens = fit_kv_capacity(
            config,
            most_of_a_host,
            args.kv_cache_tokens,
            most_memory,
            memory_tokens or 0,
            getattr(args, "window_kv_tokens", None),
        )
        return "cpu", tokens, memory_tokens or tokens
    gpus = host_gpus()
    check_torch()
    device = cost_device(gpus[0])
    fit = partial(
        fit_gpu_kv_capacity,
        config,
        gpus,
        ClusterSize(most + num_memory, args.tensor_parallel_size, args.num_hosts),
        utilization=args.gpu_memory_utilization,
        graph_limits=DEVICES[device].graph_limits,
        keeps_fp8=keeps_fp8(device),
    )
    on_memory = fit(asked=memory_tokens, has_weights=False) if num_memory else 0
    tokens = fit(asked=args.kv_cache_tokens, memory_tokens=on_memory)
    return device, tokens, on_memory or tokens
