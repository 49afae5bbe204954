"""Simulated runs: one policy under one rule at one rate, or a sweep of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import loong
from loong.core.cluster_history import ClusterHistory
from loong.core.snapshot import ClusterStats
from loong.engine.refusals import Refusals
from loong.observability.recording.lines import VERSION, Setting
from loong.observability.recording.refused import RefusedPlans
from loong.observability.timeline import Timeline
from loong.runs import run_tables
from loong.runs.run import PolicyRun, RunKey, allowed_misses
from loong.runs.run_logs import run_logs
from loong.scheduler.policy import make_policy, policy_kind
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import SimulateConfig
from loong.simulation.parallel import in_order
from loong.simulation.run import simulate
from loong.workloads.metrics.backlog import used_capacity
from loong.workloads.metrics.counters import SERIES, ServerCounters
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.result import columns_json
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.pareto import Devices, DeviceUnit


@dataclass(frozen=True, slots=True)
class PointResult(PolicyRun):
    """The result of a run; `history` says what ran when, and `decision_log` why, if that was kept."""

    num_events: int
    history: ClusterHistory | None = None
    decision_log: Path | None = None


def run_point(
    config: SimulateConfig,
    asked: RunKey,
    *,
    keeps_history: bool = False,
    cuts_off: bool = False,
    is_reported: bool = False,
) -> PointResult:
    """Simulate once.

    `cuts_off` ends the run as soon as it is clear that it does not attain. A run that `is_reported` prints
    its line when it is over, in any process.
    """
    load, cluster = config.load.at(asked.rate), config.hardware.cluster(asked.policy)
    limits_of = asked.rule.limits_of(config.hardware.unloaded_prefill())
    work_of = config.hardware.unloaded_work()
    timeline, setting = Timeline(), _setting(config, asked, cluster)
    logs = config.logs
    if keeps_history and logs.decisions is None:
        logs = replace(logs, decisions=_decision_log(config, asked))
    with run_logs(logs, setting) as observers:
        run = simulate(
            make_policy(asked.policy, config.policy),
            cluster,
            load,
            limits_of,
            host=config.host,
            observers=(timeline, *observers) if keeps_history else observers,
            misses=allowed_misses(load.measured, asked, config.load.length_scale) if cuts_off else None,
            work_of=work_of if cuts_off and asked.is_per_class else None,
            keeps_prefixes=setting.keeps_prefixes,
            relays=config.relays,
            refusals=_refusals(setting, cluster),
        )
    metrics = compute_metrics(run.records, limits_of, length_scale=config.load.length_scale)
    result = PointResult(
        asked,
        metrics,
        columns_json(run.records, limits_of),
        counters_of(run.stats),
        run.is_cut_off,
        used_capacity(run.records, work_of, run.end, config.hardware.num_devices, limits_of),
        Devices(config.hardware.num_devices, DeviceUnit.of_device(config.hardware.device)),
        run.num_events,
        timeline.history() if keeps_history else None,
        logs.decisions,
    )
    if is_reported:
        print(f"{run_tables.line(result)}\n", end="", flush=True)  # in one piece: other processes also print
    return result


def _refusals(setting: Setting, cluster: SimulatedCluster) -> Refusals | None:
    """Return where refused plans go: with windows some are, as plans count the room of other layers alone."""
    return None if cluster.windows is None else Refusals(RefusedPlans(setting, Path(gettempdir())).record)


def _setting(config: SimulateConfig, asked: RunKey, cluster: SimulatedCluster) -> Setting:
    return Setting(
        VERSION,
        loong.__version__,
        cluster.instances,
        asked.policy,
        config.policy,
        cluster.cost_model,
        keeps_prefixes=config.keeps_prefixes and policy_kind(asked.policy).reads_prefixes,
        least_saved=cluster.cost_model.least_saved if config.relays else None,
        windows=cluster.windows,
    )


def asked_of(config: SimulateConfig, policy: str, rule: SLORule, rate: float) -> RunKey:
    """Return the parameters of a run at a rate."""
    return RunKey(policy, rule, rate, config.goal, config.load.seed, is_per_class=config.is_per_class)


def all_asked(config: SimulateConfig) -> list[RunKey]:
    """Return every run of a sweep: each policy under each rule at each rate."""
    return [
        asked_of(config, policy, rule, rate)
        for rule in config.rules
        for policy in config.policies
        for rate in config.rates
    ]


def sweep(
    config: SimulateConfig, on_result: Callable[[PointResult], None] | None = None
) -> list[PointResult]:
    """Make and return all runs; `on_result` is called with each run as soon as it is over.

    Runs at one rate keep their history, which is drawn.
    """
    work = partial(run_point, config, keeps_history=config.is_single)
    return in_order(work, all_asked(config), config.num_jobs, on_result)


def _decision_log(config: SimulateConfig, asked: RunKey) -> Path:
    """Return where the decisions of a run are written, for its report; under another rule, numbered."""
    assert config.output_dir is not None
    number = config.rules.index(asked.rule) + 1
    path = config.output_dir / f"decisions-{asked.policy}{f'-{number}' if number > 1 else ''}.jsonl"
    path.unlink(missing_ok=True)  # a decision log appends to an existing file
    return path


def counters_of(stats: ClusterStats) -> ServerCounters:
    """Return the counters that a server would report."""
    return ServerCounters(
        dict(sorted(stats.num_batches_by_dop.items())), **{name: getattr(stats, name) for name in SERIES}
    )
