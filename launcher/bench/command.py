"""`loong bench`: send a workload to servers, or to one of our own for each policy, and report."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.bench.chosen_load import FEWEST_REQUESTS, Auto, choose_load
from loong.launcher.bench.config import BenchConfig, BenchLoadConfig, ExternalServer, Server, check_lengths
from loong.launcher.bench.flags import (
    add_load_flags,
    add_report_flags,
    add_server_flags,
)
from loong.launcher.bench.peers import peers_of
from loong.launcher.bench.policies import servers_by_policy
from loong.launcher.flags import host_tier_words, prefix_caching_words
from loong.launcher.keys import key_of_client
from loong.launcher.other_servers import hint_of_bench, hint_of_serve
from loong.launcher.policy_flags import compared_policies
from loong.runs.peer_server import PeerServer
from loong.runs.rates import parse_rates
from loong.runs.run import check_classes
from loong.runs.shown_command import shown_command
from loong.runs.spawned_server import ServerConfig
from loong.workloads.client.backends import ServerApi
from loong.workloads.metrics.slo import SLORule, parse_slo
from loong.workloads.report.pareto import Devices, DeviceUnit
from loong.workloads.workload import pace_of

if TYPE_CHECKING:
    from loong.launcher.parser import CommandParser

    Subparsers = argparse._SubParsersAction[CommandParser]

EXAMPLES = """examples:
  loong bench --workload mixed                            # on a server started here, for a minute; or:
  loong bench --base-url http://localhost:8000            # on any OpenAI-compatible one
  loong bench --workload mixed --length-scale 1/64 --request-rate 4 --policy esp,static-sp
  loong bench --num-instances 2 --policy esp,tp --length-scale 1/64   # tp: the same processes, one instance
  loong bench --base-url http://localhost:8000 --workload sharegpt --goodput ttft:2000 tpot:50
  loong bench --base-url loong=http://localhost:8000 --base-url vllm=http://localhost:8001 --slo tight
  loong bench --model Qwen/Qwen3-8B --num-instances 2 --policy esp --peer vllm-tp2 --peer vllm-dp2
  loong bench --num-instances 2 --policy esp,tp --length-scale 1/64 --request-rate 8 --find-goodput
  loong bench --policy esp,replicas --length-scale 1/64 --request-rate 8 --find-goodput --per-class
  loong bench --workload leval --max-concurrency 8 --num-instances 8 --model ./my-model
  loong bench --workload '0.7*sharegpt+0.3*lveval@gamma(2,0.5)' --length-scale 1/64 --repeat 3
  loong bench --workload 'trace:azure.csv@replay(2)' --length-scale 1/64
"""

_NAMED_URL = re.compile(r"(?:([\w.-]+)=)?(https?://.+)")


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `bench` and its flags."""
    parser = subparsers.add_parser(
        "bench",
        help="send a workload to servers and report latencies, throughput and SLO attainment",
        description="Send a workload to servers, or to one started here for each policy, and report.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.elsewhere = _flag_of_serve
    add_server_flags(parser.add_argument_group("server"))
    add_load_flags(parser.add_argument_group("load"))
    add_report_flags(parser.add_argument_group("report"))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and report; 0 if every request succeeded, 1 if any failed."""
    from loong.launcher.bench.run import run_bench  # imports what `--help` can do without

    return run_bench(_with_chosen_load(*_config(args)), shown_command(["loong", *sys.argv[1:]]))


def _flag_of_serve(flag: str) -> str | None:
    """Return the hint for a flag that `bench` does not have: `--extra-server-args`, or its replacement."""
    from loong.launcher.cli import build_parser  # which imports this

    if (words := hint_of_bench(flag)) is not None:
        return words
    if flag not in build_parser(["serve"])[1]["serve"].flags:
        return hint_of_serve(flag)
    return f"; servers that are started here take it in --extra-server-args='{flag} ...'"


def _with_chosen_load(config: BenchConfig, auto: Auto) -> BenchConfig:
    """Return the configuration with every `auto` value chosen; the lengths of its requests are checked.

    Raises `ConfigError` or `ServerUnusableError` if the load cannot be measured.
    """
    from loong.launcher.bench.served import served_by  # imports what `--help` can do without

    served = served_by(config)
    load, chosen = choose_load(config.load, auto, served, config.num_repeats)
    for repeat in range(config.num_repeats):
        check_lengths(load.requests(max(load.rates), repeat), served.max_tokens)
    if config.is_per_class:
        check_classes([config.slo], load.requests(max(load.rates), 0), load.length_scale)
    devices = {
        name: Devices(server.num_gpus, DeviceUnit.GPU)
        for name, server in config.servers.items()
        if not isinstance(server, ServerConfig) and server.num_gpus is not None
    }
    return replace(
        config, load=load, work_of=served.work_of, devices={**served.devices, **devices}, chosen=chosen
    )


def _config(args: argparse.Namespace) -> tuple[BenchConfig, Auto]:
    """Return the configuration that the flags give, and which of its values are still to be chosen.

    A value that is still to be chosen holds a placeholder.
    """
    rule = _slo(args)
    load, auto = _load_config(args)
    config = BenchConfig(
        servers=_servers(args, rule),
        load=load,
        slo=rule,
        output_dir=args.output_dir,
        api_key=key_of_client(args),
        goal=args.attainment / 100,
        is_per_class=args.per_class,
        num_repeats=args.repeat,
        precision=args.find_goodput,
        is_json_printed=args.json or not sys.stdout.isatty(),
    )
    return config, auto


def _servers(args: argparse.Namespace, rule: SLORule) -> Mapping[str, Server]:
    """Return our servers or those that are there, and then the peers, in the order of the flags."""
    others = _other_servers(args)
    if args.policy is None and others:
        return others
    if args.base_url is not None:
        asked = ",".join(args.policy)
        raise ConfigError(f"--policy {asked} is fixed by the server at --base-url; leave one out")
    ours = _own_servers(args, rule)
    if both := ours.keys() & others.keys():
        raise ConfigError(f"--peer {min(both)} has the name of a --policy; give it another")
    return {**ours, **others}


def _own_servers(args: argparse.Namespace, rule: SLORule) -> dict[str, ServerConfig]:
    server = ServerConfig(
        model=args.model,
        num_instances=args.num_instances,
        tensor_parallel_size=args.tensor_parallel_size,
        extra_arguments=(*_own_arguments(args), *_targets(rule), *args.extra_server_args),
        start_timeout=args.start_timeout,
    )
    return servers_by_policy(args.policy or compared_policies(args.num_instances), server)


def _other_servers(args: argparse.Namespace) -> dict[str, ExternalServer | PeerServer]:
    """Return the servers that are there, and the peers, with their `--backend` and `--num-gpus`."""
    external, peers = _external_servers(args.base_url or [], args.model), peers_of(args)
    if both := external.keys() & peers.keys():
        raise ConfigError(f"--base-url and --peer both name {min(both)}; give it another name")
    servers: dict[str, ExternalServer | PeerServer] = {**external, **peers}
    backends, num_gpus = args.backend or ["openai"], _num_gpus(args.num_gpus, servers)
    if args.backend is not None and len(backends) not in (1, len(servers)):
        raise ConfigError(
            f"--backend is given {len(backends)} times, for {len(servers)} --base-url and --peer"
        )
    if args.backend is not None and not servers:
        raise ConfigError(
            f"--backend {args.backend[0]} is of a server at --base-url or of --peer; give that too"
        )
    return {
        name: replace(
            server,
            backend=ServerApi(backends[index % len(backends)]),
            num_gpus=num_gpus.get(name, server.num_gpus),
        )
        for index, (name, server) in enumerate(servers.items())
    }


def _num_gpus(texts: Sequence[str], servers: Mapping[str, object]) -> dict[str, int]:
    """Return the GPUs of each server that the texts, `N` or `NAME=N`, give."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"--num-gpus {text!r} is no whole number of at least 1; write N or NAME=N")
        names = [name] if equals else list(servers)
        if not names or not servers.keys() >= set(names):
            raise ConfigError(f"--num-gpus {text} is of no server of --base-url or --peer")
        found |= dict.fromkeys(names, int(number))
    return found


def _external_servers(texts: Sequence[str], model: str | None) -> dict[str, ExternalServer]:
    servers: dict[str, ExternalServer] = {}
    for text in texts:
        match = _NAMED_URL.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--base-url {text!r} has no scheme; write http://HOST:PORT, or NAME=http://..."
            )
        base_url = match[2].rstrip("/").removesuffix("/v1")
        name = match[1] or base_url
        if name in servers:
            raise ConfigError(f"--base-url names {name} twice; write NAME=URL with different names")
        servers[name] = ExternalServer(base_url, model)
    return servers


def _own_arguments(args: argparse.Namespace) -> list[str]:
    given = (("--device", args.device), ("--load-format", args.load_format))
    words = [word for flag, value in given if value is not None for word in (flag, value)]
    return [*words, *prefix_caching_words(args), *host_tier_words(args)]


def _targets(rule: SLORule) -> list[str]:
    """Return the flags that make a server of ours plan for the SLO of its requests.

    There is none for a bound of each prompt token.
    """
    limits = rule.limits(0, lambda _: 0.0)
    given = [("--target-ttft", limits.ttft), ("--target-tpot", limits.targets(0)[1])]
    if rule.needs_prefill_time:
        given.append(("--ttft-factor", rule.prefill_factor * rule.scale))
    return [word for flag, value in given if value < inf for word in (flag, f"{value:g}")]


def _load_config(args: argparse.Namespace) -> tuple[BenchLoadConfig, Auto]:
    rates: tuple[float, ...] = ()
    if args.request_rate not in (None, "auto"):
        rates = parse_rates("--request-rate", args.request_rate, may_be_infinite=True)
    pace = pace_of(args.workload, max(rates, default=None), args.burstiness)
    is_closed = args.max_concurrency is not None or pace.max_concurrency is not None
    auto = Auto(
        length_scale=args.length_scale is None,
        request_rate=not rates and pace.request_rate == inf and not is_closed,
        num_requests=args.num_requests is None and args.duration is None,
    )
    if auto.request_rate:
        rates = (1.0,)
        pace = pace_of(args.workload, rates[0], args.burstiness)
    load = BenchLoadConfig(
        workload=args.workload,
        num_requests=FEWEST_REQUESTS if auto.num_requests else args.num_requests,
        duration=args.duration,
        rates=rates or (pace.request_rate,),
        burstiness=pace.burstiness,
        max_concurrency=pace.max_concurrency if args.max_concurrency is None else args.max_concurrency,
        seed=args.seed,
        length_scale=args.length_scale or 1.0,
        output_scale=args.output_scale,
        num_warmups=args.num_warmups,
        vocab_size=args.vocab_size,
        request_timeout=args.request_timeout,
        extra_body=args.extra_body,
    )
    return load, auto


def _slo(args: argparse.Namespace) -> SLORule:
    flag, text = ("--slo", args.slo) if args.goodput is None else ("--goodput", " ".join(args.goodput))
    try:
        return parse_slo(text, scale=args.slo_scale, workload=args.workload)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
