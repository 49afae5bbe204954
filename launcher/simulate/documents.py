"""What a simulation tells programs, as objects for JSON: all of it, or in short."""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf

import msgspec

from loong.launcher.machine import machine_facts
from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.points import PointResult
from loong.launcher.simulate.search import Goodput
from loong.workloads.result import JSON, metrics_json


def results_json(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput], command: str
) -> dict[str, JSON]:
    """What was asked for and all that came of it."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine_facts()),
        "configuration": _configuration(config),
        "goodput": _goodput_json(goodputs),
        "runs": [_run_json(result) for result in results],
    }


def summary_json(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput]
) -> dict[str, JSON]:
    """What came of it, in short: attainment where each policy ran at one rate, else goodput."""
    found = {"goodput": _goodput_json(goodputs)} if goodputs else {"attainment": _attainment_json(results)}
    return {"workload": config.load.workload, "seed": config.load.seed, **found}


def _configuration(config: SimulateConfig) -> dict[str, JSON]:
    """What was asked for; infinities are words, as JSON has no number for them."""
    load = config.load
    return {
        "model": config.model,
        "hardware": msgspec.to_builtins(config.hardware),
        "workload": load.workload,
        "seed": load.seed,
        "num_requests": load.num_requests,
        "duration": load.duration,
        "burstiness": _number(load.burstiness),
        "length_scale": load.length_scale,
        "rates": list(config.rates),
        "precision": config.precision,
        "slos": [rule.describe() for rule in config.rules],
        "policies": list(config.policies),
        "policy": msgspec.to_builtins(config.policy),
        "num_cores": _number(config.host.num_cores),
        "plan_time": config.host.plan_time,
    }


def _run_json(result: PointResult) -> dict[str, JSON]:
    stats = result.stats
    return {
        "policy": result.point.policy,
        "slo": result.point.rule.describe(),
        "request_rate": result.point.rate,
        "is_cut_off": result.is_cut_off,
        "num_events": result.num_events,
        **metrics_json(result.metrics),
        "num_batches_by_dop": {str(dop): count for dop, count in sorted(stats.num_batches_by_dop.items())},
        "num_scale_ups": stats.num_scale_ups,
        "num_scale_downs": stats.num_scale_downs,
        "num_retained_tokens": stats.num_retained_tokens,
        "num_migrated_tokens": stats.num_migrated_tokens,
        "num_preemptions": stats.num_preemptions,
    }


def _goodput_json(goodputs: Sequence[Goodput]) -> JSON:
    return [
        {
            "policy": g.policy,
            "slo": g.rule.describe(),
            "request_rate": g.rate,
            "too_high_rate": g.too_high_rate,
            "runs": len(g.points),
        }
        for g in goodputs
    ]


def _attainment_json(results: Sequence[PointResult]) -> JSON:
    return [
        {
            "policy": result.point.policy,
            "slo": result.point.rule.describe(),
            "request_rate": result.point.rate,
            "slo_attainment": result.metrics.attainment,
        }
        for result in results
    ]


def _number(value: float | None) -> JSON:
    return "inf" if value == inf else value
