"""`loong serve`: flags, checked and put into one configuration."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from loong.launcher.flags import or_auto, positive, token_count

if TYPE_CHECKING:
    from loong.launcher.serving import ServeConfig

_EXAMPLES = """\
examples:
  loong serve
  loong serve ./Llama-3.1-8B --num-instances 2 --tensor-parallel-size 2 --max-model-len 25.6k
  loong serve llama-3.1-8b --load-format dummy --policy static-sp
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `serve` and its flags."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model. Without MODEL: a tiny built-in random one, made on first use.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_model_flags(parser.add_argument_group("model"))
    _add_cluster_flags(parser.add_argument_group("cluster"))
    _add_scheduling_flags(parser.add_argument_group("scheduling"))
    _add_server_flags(parser.add_argument_group("server"))


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; 0 if that ended well, 1 if the engine failed."""
    from loong.launcher.serving import serve_until_stopped  # imports torch, which `--help` can do without

    return serve_until_stopped(_config(args))


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("model", nargs="?", metavar="MODEL", help="a local Hugging Face folder")
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="dummy: random weights, also for built-in shapes such as llama-3.1-8b",
    )
    group.add_argument(
        "--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto", help="(the model's)"
    )
    group.add_argument("--seed", type=int, default=0, help="of dummy weights (0)")
    group.add_argument(
        "--max-model-len",
        type=or_auto(token_count),
        metavar="N",
        help="longest prompt and output together, such as 25.6k (auto: what model and cluster can hold)",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="in the API (the folder's name)")


def _add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", choices=("cpu",), default="cpu", help="what instances run on (cpu)")
    group.add_argument(
        "--num-instances", type=positive, default=4, metavar="N", help="replicas of the weights (4)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=1,
        metavar="N",
        help="processes an instance (1)",
    )
    group.add_argument(
        "--kv-cache-tokens",
        type=or_auto(token_count),
        metavar="N",
        help="an instance's KV pool (auto: what memory suggests, at most 65536)",
    )
    group.add_argument(
        "--host-kv-cache-tokens", type=token_count, default=0, metavar="N", help="an instance's host tier (0)"
    )


def _add_scheduling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--policy", default="esp", help="esp, static-sp, replicas or tp (esp)")
    group.add_argument(
        "--max-num-batched-tokens", type=token_count, metavar="N", help="of a prefill step, an instance"
    )
    group.add_argument("--target-ttft", type=float, metavar="S", help="seconds, for requests without an SLO")
    group.add_argument(
        "--lease-steps", type=int, metavar="N", help="decode steps that a group takes by itself"
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="(127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="may be given repeatedly"
    )
    group.add_argument(
        "--max-waiting-requests", type=int, metavar="N", help="more are refused with 503 and Retry-After"
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for open requests at the end (30)",
    )


def _config(args: argparse.Namespace) -> "ServeConfig":
    from loong.launcher.local import ClusterConfig
    from loong.launcher.memory import fit_kv_capacity
    from loong.launcher.serving import ServeConfig
    from loong.model.shapes import find_config
    from loong.model.tiny import tiny_model
    from loong.scheduler.config import PolicyConfig
    from loong.server.settings import ServerSettings

    tiny = tiny_model(_cache_folder())
    model = args.model or str(tiny)
    dtype = None if args.dtype == "auto" else args.dtype
    model_config = find_config(model, args.load_format, dtype)
    name = args.served_model_name or (Path(args.model).name if args.model else "loong-tiny")
    return ServeConfig(
        model=model_config,
        cluster=ClusterConfig(
            model=model,
            load_format=args.load_format,
            dtype=dtype,
            seed=args.seed,
            num_instances=args.num_instances,
            tp_size=args.tensor_parallel_size,
            kv_capacity=fit_kv_capacity(model_config, args.num_instances, args.kv_cache_tokens),
            host_kv_capacity=args.host_kv_cache_tokens,
        ),
        policy_name=args.policy,
        policy=PolicyConfig(**_given(args, "max_num_batched_tokens", "target_ttft", "lease_steps")),
        server=ServerSettings(name, tuple(args.api_key), **_given(args, "max_waiting_requests")),
        tokenizer_folder=Path(model) if (Path(model) / "tokenizer.json").exists() else tiny,
        max_model_len=args.max_model_len,
        host=args.host,
        port=args.port,
        drain_timeout=args.drain_timeout,
    )


def _given(args: argparse.Namespace, *names: str) -> dict[str, int]:
    """The flags that were given; the others keep the defaults of what they configure."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loong"
