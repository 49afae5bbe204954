"""The document that a benchmark or a simulation writes; `docs/benchmarking.md` describes it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loong.hardware.machine import machine_facts
from loong.private_files import write_private
from loong.runs.goodput import A, Goodput
from loong.runs.run import finite
from loong.workloads.metrics.result import JSON
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.pareto import ParetoCurves
from loong.workloads.report.run_document import SCHEMA_VERSION

FILE_NAME = "results.json"


def document_head(
    kind: str, command: str, configuration: dict[str, JSON], rules: Sequence[SLORule], goal: float
) -> dict[str, JSON]:
    """Return the members before all numbers; `kind` is `bench` or `simulate`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine_facts()),
        "configuration": configuration,
        "slos": [slo_json(rule) for rule in rules],
        "attainment_goal": goal,
    }


def slo_json(rule: SLORule) -> dict[str, JSON]:
    """Return a rule and its bounds, null where there is none."""
    bounds = ("ttft", "tpot", "e2el", "normalized", "normalized_input", "normalized_output")
    values = {name: finite(getattr(rule, name)) for name in bounds}
    return {
        "name": rule.name,
        "description": rule.describe(),
        "scale": rule.scale,
        **{name: None if value == "inf" else value for name, value in values.items()},
        "prefill_factor": rule.prefill_factor,
        "judged": rule.judged.value,
    }


def goodput_json(goodputs: Sequence[Goodput[A]], *, is_per_class: bool = False) -> JSON:
    """Return the goodputs, with the number of rates that were tried."""
    return [
        {
            "policy": g.policy,
            "slo": g.rule.describe(),
            "request_rate": g.rate,
            "too_high_rate": g.too_high_rate,
            "is_per_class": is_per_class,
            "rates": len(g.points),
        }
        for g in goodputs
    ]


def pareto_json(curves: ParetoCurves, rule: SLORule) -> list[JSON]:
    """Return the points under a rule; each of the two lists is a median, the least and the greatest."""
    return [
        {
            "policy": point.policy,
            "slo": rule.describe(),
            "request_rate": finite(point.rate),
            "unit": curves.unit.value,
            "output_throughput_per_unit": list(point.throughput),
            "output_throughput_per_user": list(point.speed),
            "is_on_frontier": point.is_best,
            "is_on_frontier_of_all": point.is_best_of_all,
        }
        for point in curves.points
    ]


def write_document(folder: Path, document: dict[str, JSON], runs: Sequence[dict[str, JSON]]) -> Path:
    """Write the document, a member a line and a run a line; return its path."""
    members = [f"{_encoded(name)}:{_encoded(value)}" for name, value in document.items()]
    members.append('"runs":[\n' + ",\n".join(map(_encoded, runs)) + "\n]")
    path = folder / FILE_NAME
    write_private(path, "{\n" + ",\n".join(members) + "\n}\n")
    return path


def _encoded(value: JSON) -> str:
    return msgspec.json.encode(value).decode()
