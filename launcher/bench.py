"""`loong bench`: send a workload to a server, or to one of our own for each policy, and report."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loong.core.errors import ConfigError
from loong.launcher.bench_config import BenchConfig, ExternalServer, LoadConfig, Server
from loong.launcher.bench_policies import servers_by_policy
from loong.launcher.embedded import ServerConfig
from loong.launcher.flags import add_workload_flags, ratio
from loong.workloads.slo import NAMED_RULES, SLORule, parse_slo
from loong.workloads.workload import pace_of

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

T = TypeVar("T")

DEFAULT_POLICY = "esp"
DEFAULT_SLO = "tight"
SMALLEST_VOCABULARY = 256  # ids below it are in every model's vocabulary, byte-level ones included

EXAMPLES = """examples:
  loong bench --workload mixed --length-scale 1/64 --request-rate 4 --policy esp,static-sp
  loong bench --num-instances 2 --policy esp,tp --length-scale 1/64   # tp: the same processes, one instance
  loong bench --base-url http://localhost:8000 --workload sharegpt --goodput ttft:2000 tpot:50
  loong bench --workload leval --max-concurrency 8 --num-instances 8 --model ./my-model
  loong bench --workload '0.7*sharegpt+0.3*lveval@gamma(2,0.5)' --length-scale 1/64
  loong bench --workload 'trace:azure.csv@replay(2)' --length-scale 1/64
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `bench` and its flags."""
    parser = subparsers.add_parser(
        "bench",
        help="send a workload to a server and report latencies, throughput and SLO attainment",
        description="Send a workload to a server, or to one started here for each policy, and report.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_report_flags(parser.add_argument_group("report"))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and report; 0 if every request succeeded, 1 if any failed."""
    from loong.launcher.bench_run import run_bench  # imports aiohttp, which `--help` can do without

    return run_bench(_config(args), shlex.join(["loong", *sys.argv[1:]]))


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="measure this server, any OpenAI-compatible one")
    group.add_argument("--policy", metavar="P,P", help=f"start a server for each (default: {DEFAULT_POLICY})")
    group.add_argument("--model", help="what to serve, or which served model to ask (default: the first)")
    group.add_argument("--num-instances", type=int, default=4, help="of a server started here (default: 4)")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="of each (default: 1)")
    group.add_argument(
        "--extra-server-args",
        type=_flag(_split),
        default=(),
        metavar="=ARGS",
        help="more for `loong serve`, as one word: --extra-server-args='--max-model-len 32k'",
    )
    group.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="S", help="for a server to be healthy (600)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    add_workload_flags(group)
    group.add_argument("--num-requests", type=int, default=100, help="(default: 100)")
    group.add_argument(
        "--request-rate", type=float, help="requests per second (default: inf, or the workload's own pace)"
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="at most N requests in flight")
    group.add_argument("--num-warmups", type=int, default=4, help="requests before the clock (default: 4)")
    group.add_argument(
        "--vocab-size",
        type=int,
        default=SMALLEST_VOCABULARY,
        help=f"prompt token ids are below it (default: {SMALLEST_VOCABULARY}, which every model has)",
    )
    group.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="S", help="for one request (default: 3600)"
    )


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    rules = group.add_mutually_exclusive_group()
    rules.add_argument(
        "--slo",
        default=DEFAULT_SLO,
        help=f"{', '.join(NAMED_RULES)}, or bounds as for --goodput in one word (default: {DEFAULT_SLO})",
    )
    rules.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="bounds in ms on ttft, tpot, e2el: ttft:2000 tpot:50",
    )
    group.add_argument(
        "--slo-scale", type=ratio, default=1.0, metavar="X", help="multiply every bound (default: 1)"
    )
    group.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write results.json, timeline.png and .svg, server logs",
    )


def _config(args: argparse.Namespace) -> BenchConfig:
    return BenchConfig(
        servers=_servers(args),
        load=_load_config(args),
        slo=_slo(args),
        output_dir=args.output_dir,
        api_key=os.environ.get("OPENAI_API_KEY"),
    )


def _servers(args: argparse.Namespace) -> Mapping[str, Server]:
    if args.base_url is not None:
        if args.policy is not None:
            raise ConfigError(f"--policy {args.policy} is fixed by the server at --base-url; leave one out")
        base_url = _base_url(args.base_url)
        return {base_url: ExternalServer(base_url, args.model)}
    server = ServerConfig(
        model=args.model,
        num_instances=args.num_instances,
        tensor_parallel_size=args.tensor_parallel_size,
        extra_arguments=args.extra_server_args,
        start_timeout=args.start_timeout,
    )
    return servers_by_policy((args.policy or DEFAULT_POLICY).split(","), server)


def _load_config(args: argparse.Namespace) -> LoadConfig:
    pace = pace_of(args.workload, args.request_rate, args.burstiness)
    return LoadConfig(
        workload=args.workload,
        num_requests=args.num_requests,
        request_rate=pace.request_rate,
        burstiness=pace.burstiness,
        max_concurrency=pace.max_concurrency if args.max_concurrency is None else args.max_concurrency,
        seed=args.seed,
        length_scale=args.length_scale,
        num_warmups=args.num_warmups,
        vocab_size=args.vocab_size,
        request_timeout=args.request_timeout,
    )


def _slo(args: argparse.Namespace) -> SLORule:
    flag, text = ("--slo", args.slo) if args.goodput is None else ("--goodput", " ".join(args.goodput))
    try:
        return parse_slo(text, scale=args.slo_scale)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _base_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {text!r} has no scheme; write http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def _flag(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse show what a parser says; it would replace the words of a ValueError by its own."""

    def parse_flag(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_flag


def _split(text: str) -> tuple[str, ...]:
    try:
        words: Sequence[str] = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} cannot be split into words: {error}") from error
    return tuple(words)
