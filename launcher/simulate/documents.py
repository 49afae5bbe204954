"""JSON objects of a simulation for programs: the configuration, each run, or a summary."""

from collections.abc import Sequence

import msgspec

from loong.runs.goodput import Goodput
from loong.runs.run import finite
from loong.runs.run_document import goodput_json
from loong.simulation.config import SimulateConfig
from loong.simulation.points import PointResult
from loong.workloads.metrics.result import JSON


def summary_json(
    config: SimulateConfig, results: Sequence[PointResult], goodputs: Sequence[Goodput[PointResult]]
) -> dict[str, JSON]:
    """Return a summary of the results: attainment where each policy ran at one rate, else goodput."""
    found = (
        {"goodput": goodput_json(goodputs, is_per_class=config.is_per_class)}
        if goodputs
        else {"attainment": _attainment_json(results)}
    )
    return {"workload": config.load.workload, "seed": config.load.seed, **found}


def run_json(result: PointResult, trace: str | None) -> dict[str, JSON]:
    """Return a run, and the file of its trace if it has one."""
    return {
        **result.as_json(),
        "num_events": result.num_events,
        "trace": trace,
    }


def configuration_json(config: SimulateConfig) -> dict[str, JSON]:
    """Return the configuration; infinities are words, as JSON has no number for them."""
    load = config.load
    return {
        "model": config.model,
        "hardware": msgspec.to_builtins(config.hardware),
        "workload": load.workload,
        "seed": load.seed,
        "num_requests": load.num_requests,
        "duration": load.duration,
        "burstiness": finite(load.burstiness),
        "length_scale": load.length_scale,
        "output_scale": load.output_scale,
        "rates": list(config.rates),
        "precision": config.precision,
        "is_per_class": config.is_per_class,
        "slos": [rule.describe() for rule in config.rules],
        "policies": list(config.policies),
        "policy": msgspec.to_builtins(config.policy),
        "keeps_prefixes": config.keeps_prefixes,
        "relays": config.relays,
        "num_cores": finite(config.host.num_cores),
        "plan_time": config.host.plan_time,
        "noise": config.host.noise,
        "chosen": list(config.chosen),
    }


def _attainment_json(results: Sequence[PointResult]) -> JSON:
    return [
        {
            "policy": result.policy,
            "slo": result.asked.rule.describe(),
            "request_rate": result.rate,
            "slo_attainment": result.metrics.attainment,
        }
        for result in results
    ]
