"""`loong simulate`: flags, checked and put into one configuration."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.hardware.machine import num_processors
from loong.launcher.config_flags import field_values
from loong.launcher.flags import add_prefix_caching_flag
from loong.launcher.policy_flags import add_policy_flags, compared_policies, policy_config
from loong.launcher.simulate.chosen_hardware import chosen_hardware
from loong.launcher.simulate.flags import (
    DEFAULT_SLO,
    HOST_FLAGS,
    SWEPT_SHARES,
    add_cluster_flags,
    add_load_flags,
    add_log_flags,
    add_report_flags,
)
from loong.processes.gc_tuning import tune_gc
from loong.runs.rates import parse_rates
from loong.runs.run_logs import LogFiles
from loong.runs.shown_command import shown_command
from loong.simulation.config import (
    CLASS_REQUESTS,
    DEFAULT_DURATION,
    MIN_REQUESTS,
    Host,
    SimulateConfig,
    SimulatedLoadConfig,
)
from loong.workloads.metrics.slo import SLORule, parse_slo
from loong.workloads.workload import pace_of

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  loong simulate                         # a mixed load at rates around the capacity: one to three minutes
  loong simulate --workload mixed --rate 0.5 --policy esp,tp --output-dir report
  loong simulate --workload sharegpt --rate 20:200:20 --policy esp,replicas --jobs 2
  loong simulate --workload lveval --model lwm-1m --goodput --slo tight --slo loongserve-12
  loong simulate --workload zipf1.0 --policy esp,replicas --find-goodput --per-class
  loong simulate --workload 'trace:azure.csv@replay(2)' --policy esp,replicas
  loong simulate --replay events.jsonl   # of `loong serve --event-log events.jsonl`
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command `simulate` and its flags."""
    parser = subparsers.add_parser(
        "simulate",
        help="compare policies under load in virtual time, without a device",
        description="Run the scheduler under a workload in virtual time, for each policy, and report.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    add_cluster_flags(parser.add_argument_group("cluster"))
    scheduling = parser.add_argument_group("scheduling")
    add_policy_flags(scheduling)
    add_prefix_caching_flag(scheduling)
    add_load_flags(parser.add_argument_group("load"))
    add_report_flags(parser.add_argument_group("report"))
    add_log_flags(parser.add_argument_group("logs"))


def run(args: argparse.Namespace) -> int:
    """Simulate and report, or replay: return 0 if that worked, even if SLOs were missed.

    1 if a replay differs.
    """
    from loong.launcher.simulate.report import simulate_and_report
    from loong.simulation.replay import replay_and_report  # these import what `--help` can do without

    if args.replay is not None:
        _refuse_more_than_replay(args)
        return replay_and_report(args.replay)
    tune_gc()
    simulate_and_report(_config(args), shown_command(["loong", *sys.argv[1:]]))
    return 0


def _config(args: argparse.Namespace) -> SimulateConfig:
    rates = parse_rates("--rate", args.rate) if args.rate not in (None, "auto") else ()
    if pace_of(args.workload).max_concurrency is not None:
        raise ConfigError(
            f"--workload {args.workload} waits for answers, and here requests come by the clock; "
            "leave out @closed and give --rate"
        )
    pace = pace_of(args.workload, max(rates, default=None), args.burstiness)
    if not rates and pace.request_rate < inf and args.goodput is None:
        rates = (pace.request_rate,)
    model, hardware = chosen_hardware(args)
    is_chosen = not rates and args.goodput is None
    is_compared = is_chosen and hardware.windows is None  # which other policies do without
    config = SimulateConfig(
        model=model,
        policies=args.policy or (compared_policies(hardware.num_instances) if is_compared else ("esp",)),
        rules=_rules(args.slo or [DEFAULT_SLO], args.slo_scale, args.workload),
        rates=rates,
        hardware=hardware,
        load=SimulatedLoadConfig(
            args.workload,
            args.seed,
            _num_requests(args, is_chosen=is_chosen),
            args.duration or DEFAULT_DURATION,
            pace.burstiness,
            args.length_scale,
            args.output_scale,
            args.declared_tokens,
        ),
        precision=args.goodput,
        goal=args.attainment / 100,
        is_per_class=args.per_class,
        policy=policy_config(args),
        host=Host(**field_values(args, HOST_FLAGS)),
        num_jobs=args.jobs or num_processors(),
        output_dir=args.output_dir,
        is_json_printed=args.json or not sys.stdout.isatty(),
        logs=LogFiles(args.decision_log, args.event_log, keeps_prompts=args.enable_prefix_caching),
        keeps_prefixes=args.enable_prefix_caching,
        relays=args.relay,
    )
    _check(config)
    return _with_chosen_rates(config) if is_chosen else config


def _num_requests(args: argparse.Namespace, *, is_chosen: bool) -> int | None:
    """Return how many requests are sent; None if --duration says it."""
    if args.per_class:
        if args.duration:
            raise ConfigError("--per-class sends the same requests at every rate; give no --duration")
        return args.num_requests or CLASS_REQUESTS
    return MIN_REQUESTS if is_chosen and not (args.num_requests or args.duration) else args.num_requests


def _with_chosen_rates(config: SimulateConfig) -> SimulateConfig:
    """Return the configuration at rates around the predicted capacity, with the line that says so."""
    from loong.simulation.capacity import rounded_down
    from loong.simulation.search import capacity_of

    capacity = capacity_of(config)
    rates = tuple(rounded_down(share * capacity) for share in SWEPT_SHARES)
    listed, shares = (",".join(f"{n:g}" for n in numbers) for numbers in (rates, SWEPT_SHARES))
    line = (
        f"Chosen: --rate {listed}, which is {shares} times the {capacity:.2g} req/s that the cost model "
        f"predicts as capacity; --policy {','.join(config.policies)}"
    )
    if config.load.num_requests is not None:
        line += f"; --num-requests {config.load.num_requests}"
    return replace(config, rates=rates, chosen=(f"{line}. Give these flags to choose otherwise.",))


def _refuse_more_than_replay(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that a replay would ignore, unless they have their default."""
    for name in args.chosen:
        if name != "replay":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--replay takes everything from its file, and has no use for {flag}")


def _rules(texts: Sequence[str], scale: float, workload: str) -> tuple[SLORule, ...]:
    rules: list[SLORule] = []
    for text in texts:
        try:
            rule = parse_slo(text, scale=scale, workload=workload)
        except ConfigError as error:
            raise ConfigError(f"--slo: {error}") from error
        if rule in rules:
            raise ConfigError(f"--slo {text} is given twice")
        rules.append(rule)
    return tuple(rules)


def _check(config: SimulateConfig) -> None:
    """Raise `ConfigError` now for values that would fail later."""
    for policy in config.policies:
        config.hardware.cluster(policy)
    load, num_requests = config.load, config.load.num_requests
    num_sent = len(load.at(max(config.rates, default=1.0)).measured)
    if num_requests is not None and num_sent < num_requests:
        raise ConfigError(f"--num-requests {num_requests} is more than the {num_sent} of {load.workload}")
