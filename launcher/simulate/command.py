"""`loong simulate`: flags, checked and put into one configuration."""

import argparse
import shlex
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.cost_model_file import read_cost_model
from loong.launcher.flags import positive, ratio, seconds, token_count
from loong.launcher.model_shape import shape_of
from loong.launcher.policy_flags import add_policy_flags, policy_config
from loong.launcher.run_logs import LogFiles
from loong.launcher.simulate.cluster import Hardware
from loong.launcher.simulate.config import DEFAULT_DURATION, Host, Load, SimulateConfig, parse_rates
from loong.model.shapes import SHAPES, find_config
from loong.scheduler.roofline import DEVICES
from loong.workloads.slo import NAMED_RULES, SLORule, parse_slo
from loong.workloads.workload import WORKLOADS, own_pace

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_SLO = "tight"
DEFAULT_PRECISION = 0.05

_EXAMPLES = """\
examples:
  loong simulate --workload mixed --rate 0.5 --policy esp,tp --output-dir report
  loong simulate --workload sharegpt --rate 20:200:20 --policy esp,replicas --jobs 2
  loong simulate --workload lveval --model lwm-1m --goodput --slo tight --slo loongserve-12
  loong simulate --replay events.jsonl   (of `loong serve --event-log events.jsonl`)
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `simulate` and its flags."""
    parser = subparsers.add_parser(
        "simulate",
        help="compare policies under load in virtual time, without a device",
        description="Run the scheduler under a workload in virtual time, for each policy, and report.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_cluster_flags(parser.add_argument_group("cluster"))
    add_policy_flags(parser.add_argument_group("scheduling"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_report_flags(parser.add_argument_group("report"))
    _add_log_flags(parser.add_argument_group("logs"))


def run(args: argparse.Namespace) -> int:
    """Simulate and report, or replay: 0 if that worked, however many missed; 1 if a replay differs."""
    from loong.launcher.simulate.replay import replay_and_report  # these import what `--help` can do without
    from loong.launcher.simulate.report import simulate_and_report

    if args.replay is not None:
        return replay_and_report(args.replay)
    simulate_and_report(_config(args), shlex.join(["loong", *sys.argv[1:]]))
    return 0


def _add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--policy", default="esp", metavar="P,P", help="simulated one by one (%(default)s)")
    group.add_argument(
        "--model",
        default="llama-3.1-8b",
        help=f"a Hugging Face folder, or {', '.join(SHAPES)} (%(default)s)",
    )
    group.add_argument("--device", default="h200", help=f"{', '.join(DEVICES)} (%(default)s)")
    group.add_argument(
        "--num-instances", "--instances", type=positive, default=8, metavar="N", help="(%(default)s)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=1,
        metavar="N",
        help="devices an instance (%(default)s)",
    )
    group.add_argument(
        "--kv-cache-tokens", type=token_count, metavar="N", help="an instance's KV pool (what memory holds)"
    )
    group.add_argument(
        "--cost-model",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="from `loong profile`; one for each number of devices an instance (the device's roofline)",
    )
    group.add_argument(
        "--num-cores", type=positive, metavar="N", help="CPU instances share these cores (each has its own)"
    )
    group.add_argument(
        "--plan-time", type=seconds, metavar="S", help="from an event to what it leads to (no time)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload", default="mixed", metavar="NAME", help=f"{', '.join(WORKLOADS)} (%(default)s)"
    )
    group.add_argument(
        "--rate",
        "--request-rate",
        metavar="R",
        help="requests per second: 2, or 1,2,4, or 2:8:0.5 (the workload's own pace, if it has one)",
    )
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument("--num-requests", type=positive, metavar="N", help="of a run")
    lengths.add_argument(
        "--duration",
        type=seconds,
        default=DEFAULT_DURATION,
        metavar="S",
        help="send what arrives in this time, at least 200 requests (%(default)g)",
    )
    group.add_argument("--burstiness", type=float, help="shape of the gamma gaps: 1 is Poisson, inf constant")
    group.add_argument("--seed", type=int, default=0, help="same seed, same requests (%(default)s)")
    group.add_argument(
        "--length-scale", type=ratio, default=1.0, metavar="X", help="multiply lengths, such as 1/64"
    )


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        action="append",
        metavar="RULE",
        help=f"{', '.join(NAMED_RULES)}, or bounds in ms such as 'ttft:2000 tpot:50'; may be given "
        f"repeatedly ({DEFAULT_SLO})",
    )
    group.add_argument("--slo-scale", type=ratio, default=1.0, metavar="X", help="multiply every bound (1)")
    group.add_argument(
        "--goodput",
        type=ratio,
        nargs="?",
        const=DEFAULT_PRECISION,
        metavar="X",
        help="search the highest rate at which 90 %% meet their SLO, to this relative precision "
        f"({DEFAULT_PRECISION})",
    )
    group.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes (%(default)s)")
    group.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="write results.json, pictures and traces"
    )


def _add_log_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--event-log", type=Path, metavar="FILE", help="record the run, for --replay")
    group.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="what is decided and why, for `loong explain`"
    )
    group.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="simulate nothing: plan again on the events of an event log, and compare",
    )


def _config(args: argparse.Namespace) -> SimulateConfig:
    own_rate, own_burstiness = own_pace(args.workload)
    has_pace = args.rate is None and args.goodput is None
    if has_pace and own_rate == inf:
        raise ConfigError(f"--workload {args.workload} has no pace of its own; give --rate or --goodput")
    burstiness = own_burstiness if args.rate is None else 1.0
    config = SimulateConfig(
        model=args.model,
        policies=_policies(args.policy),
        rules=tuple(_rule(text, args.slo_scale) for text in args.slo or [DEFAULT_SLO]),
        rates=(own_rate,) if has_pace else parse_rates(args.rate) if args.rate else (),
        hardware=Hardware(
            shape_of(find_config(args.model, "dummy")),
            args.device,
            args.num_instances,
            args.tensor_parallel_size,
            args.kv_cache_tokens,
            tuple(read_cost_model(path) for path in args.cost_model),
        ),
        load=Load(
            args.workload,
            args.seed,
            args.num_requests,
            args.duration,
            burstiness if args.burstiness is None else args.burstiness,
            args.length_scale,
        ),
        precision=args.goodput,
        policy=policy_config(args),
        host=Host(args.num_cores or inf, args.plan_time or 0.0),
        num_jobs=args.jobs,
        output_dir=args.output_dir,
        logs=LogFiles(args.decision_log, args.event_log),
    )
    _check(config)
    return config


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(set(names)) < len(names):
        raise ConfigError(f"--policy {text} names a policy twice")
    return names


def _rule(text: str, scale: float) -> SLORule:
    try:
        return parse_slo(text, scale=scale)
    except ConfigError as error:
        raise ConfigError(f"--slo: {error}") from error


def _check(config: SimulateConfig) -> None:
    """Raise `ConfigError` now for what would fail later."""
    for policy in config.policies:
        config.hardware.cluster(policy)
    config.load.at(max(config.rates, default=1.0))
