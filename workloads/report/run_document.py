"""The document of a benchmark or a simulation, read back; `docs/benchmarking.md` describes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import TypeAlias

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.workloads.metrics.result import JSON

SCHEMA_VERSION = 1
SIMULATED = " (simulated)"

Scalar: TypeAlias = bool | int | float | str | None
Spread: TypeAlias = tuple[float, float, float]
"""The median, the least and the greatest of what several repetitions gave."""


class SLOText(msgspec.Struct, frozen=True):
    """A rule as the document writes it; `planned_for` is another, for which policies planned in some runs."""

    name: str
    description: str
    planned_for: str | None = None


class GoodputRow(msgspec.Struct, frozen=True):
    """The highest rate at which a policy attains, and the lowest above it at which it does not."""

    policy: str
    slo: str
    request_rate: float
    too_high_rate: float | None = None
    is_per_class: bool = False


class TraceOfRun(msgspec.Struct, frozen=True):
    """A trace file in the document's folder; the run began after this second of its clock."""

    file: str
    after: float | None = None


class RunRow(msgspec.Struct, frozen=True):
    """One run; numbers without a field are in `numbers`.

    `num_unfinished` requests of an interrupted run are not among its `num_prompts`.
    """

    policy: str
    slo: str
    request_rate: float
    num_prompts: int
    completed: int
    repeat: int = 0
    attains: bool = False
    is_cut_off: bool = False
    num_unfinished: int = 0
    slo_attainment: float | None = None
    by_prompt_length: tuple[dict[str, Scalar], ...] = ()
    num_batches_by_dop: dict[str, int] | None = None
    cost_model_errors: dict[str, float] | None = None
    trace: TraceOfRun | None = None
    requested_input_lens: tuple[int, ...] = ()
    ttfts: tuple[float | None, ...] = ()
    tpots: tuple[float | None, ...] = ()
    e2els: tuple[float | None, ...] = ()
    slo_ratios: tuple[float | None, ...] = ()
    request_ids: tuple[str, ...] = ()
    ttft_targets: tuple[float | None, ...] = ()
    errors: tuple[str, ...] = ()
    decision_log: str | None = None
    numbers: dict[str, Scalar] = {}

    def __post_init__(self) -> None:
        columns = (self.requested_input_lens, self.ttfts, self.tpots, self.e2els)
        if len(lengths := {len(column) for column in columns if column}) > 1:
            raise ValueError(f"its requests have {min(lengths)} to {max(lengths)} values each")

    def number(self, key: str) -> float | None:
        """Return a number of the run by its key; None if it is missing."""
        return as_number(self.numbers.get(key))


class RunDocument(msgspec.Struct, frozen=True):
    """The document of a benchmark or a simulation."""

    schema_version: int
    kind: str
    command: str
    date: str
    machine: dict[str, str]
    configuration: dict[str, msgspec.Raw]
    slos: tuple[SLOText, ...]
    attainment_goal: float
    runs: tuple[RunRow, ...]
    goodput: tuple[GoodputRow, ...] | None = None
    prefill_probe: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def length_scale(self) -> float:
        """Return the factor that multiplied the lengths of prompts and outputs."""
        raw = self.configuration.get("length_scale")
        scale = 1.0 if raw is None else msgspec.json.decode(raw)
        return float(scale) if isinstance(scale, float | int) else 1.0


@dataclass(frozen=True, slots=True)
class RuleRuns:
    """The runs under one SLO rule, of lengths that were multiplied by `length_scale`."""

    rule: SLOText
    goal: float
    runs: tuple[RunRow, ...]
    goodput: tuple[GoodputRow, ...]
    length_scale: float = 1.0

    @property
    def before_scaling(self) -> str:
        """Return the words that follow an unscaled length; empty if lengths were not scaled."""
        return "" if self.length_scale == 1 else f" before scaling by {_ratio(self.length_scale)}"

    @property
    def is_per_class(self) -> bool:
        """Return whether goodputs are of every length class, with a stable backlog."""
        return any(found.is_per_class for found in self.goodput)

    @property
    def goodput_name(self) -> str:
        """Return the name of the goodputs, for tables and pictures."""
        return "all-class goodput" if self.is_per_class else f"P{self.goal * 100:g} goodput"

    @property
    def judged_requests(self) -> str:
        """Return the requests of which the goal is a share, in words."""
        if self.is_per_class:
            return "the requests of every length class, with a stable backlog,"
        return "all requests"

    @property
    def policies(self) -> list[str]:
        """Return the policies, in the order of the document."""
        return list(dict.fromkeys(run.policy for run in self.runs))

    @property
    def rates(self) -> list[float]:
        """Return the requests per second asked for, ascending; infinity where all were sent at once."""
        return sorted({run.request_rate for run in self.runs})

    @property
    def shown_rate(self) -> float:
        """Return the rate to show closely: the highest goodput, or else the lowest that was completed."""
        whole = [run for run in self.runs if not run.is_cut_off] or self.runs
        best = max((found.request_rate for found in self.goodput), default=0.0)
        return best or min((run.request_rate for run in whole), default=inf)

    def at(self, policy: str, rate: float) -> list[RunRow]:
        """Return the completed repetitions of a policy at a rate."""
        return [
            run
            for run in self.runs
            if (run.policy, run.request_rate) == (policy, rate) and not run.is_cut_off
        ]

    def spread(self, policy: str, rate: float, key: str) -> Spread | None:
        """Return the spread of a number of a policy at a rate; None if it is missing."""
        return spread_of([run.number(key) for run in self.at(policy, rate)])


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Return the median, the least and the greatest of the values that are not None."""
    there = [value for value in values if value is not None]
    return (median(there), min(there), max(there)) if there else None


def as_number(value: Scalar) -> float | None:
    """Convert a number of the document, where infinity is a word; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return inf if value == "inf" else None
    return float(value)


def read_document(path: Path) -> RunDocument:
    """Read a document.

    Raises:
        ConfigError: it cannot be read, or is none of this version.
    """
    try:
        found: JSON = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path} is no document of a run: {error}") from error
    if not isinstance(found, dict) or "schema_version" not in found:
        raise ConfigError(f"{path} is no document of a run: it names no schema_version")
    if found["schema_version"] != SCHEMA_VERSION:
        version = found["schema_version"]
        raise ConfigError(f"{path} is of schema version {version}, and this loong reads {SCHEMA_VERSION}")
    try:
        return msgspec.convert(_prepared(found), RunDocument, strict=False)
    except NOT_JSON as error:
        raise ConfigError(f"{path} is no document of a run: {error}") from error


def by_rule(document: RunDocument) -> list[RuleRuns]:
    """Return the runs under each rule, in the order of the document."""
    return [
        RuleRuns(
            rule,
            document.attainment_goal,
            tuple(run for run in document.runs if run.slo == rule.description),
            tuple(found for found in document.goodput or () if found.slo == rule.description),
            document.length_scale,
        )
        for rule in document.slos
    ]


def _prepared(found: Mapping[str, JSON]) -> dict[str, object]:
    """Return the document with raw JSON for the fields of any type."""
    configuration = found.get("configuration")
    probe = found.get("prefill_probe")
    runs = found.get("runs")
    prepared: dict[str, object] = dict(found)
    if isinstance(configuration, dict):
        prepared["configuration"] = {
            name: msgspec.Raw(msgspec.json.encode(value)) for name, value in configuration.items()
        }
    prepared["prefill_probe"] = msgspec.Raw(msgspec.json.encode(probe))
    if isinstance(runs, list):
        prepared["runs"] = [_prepared_run(run) if isinstance(run, dict) else run for run in runs]
    return prepared


def _prepared_run(run: Mapping[str, JSON]) -> dict[str, object]:
    scalars = {name: value for name, value in run.items() if not isinstance(value, list | dict)}
    trace = run.get("trace")
    return {
        **run,
        "numbers": scalars,
        "trace": {"file": trace} if isinstance(trace, str) else trace,
    }


def as_simulated(document: RunDocument) -> RunDocument:
    """Return the document with its policies marked if they were simulated, to be drawn with servers'."""
    if document.kind != "simulate":
        return document
    return msgspec.structs.replace(
        document,
        runs=tuple(msgspec.structs.replace(run, policy=simulated(run.policy)) for run in document.runs),
        goodput=tuple(
            msgspec.structs.replace(found, policy=simulated(found.policy)) for found in document.goodput or ()
        ),
    )


def simulated(policy: str) -> str:
    """Return the name of a policy in virtual time, as opposed to the same one on servers."""
    return f"{policy}{SIMULATED}"


def measured(runs: RuleRuns) -> RuleRuns:
    """Return the runs without the simulated ones, so that measurements are compared with measurements.

    If all are simulated, all are returned.
    """
    if all(policy.endswith(SIMULATED) for policy in runs.policies):
        return runs
    return replace(
        runs,
        runs=tuple(run for run in runs.runs if not run.policy.endswith(SIMULATED)),
        goodput=tuple(found for found in runs.goodput if not found.policy.endswith(SIMULATED)),
    )


def merged(documents: Sequence[RunDocument]) -> RunDocument | None:
    """Merge documents into one with the runs of all.

    Facts that differ are listed for each document. Returns None if there are none.
    """
    if len(documents) < 2:
        return documents[0] if documents else None
    first = documents[0]
    numbered = list(enumerate(documents, 1))
    return msgspec.structs.replace(
        first,
        kind=" and ".join(dict.fromkeys(document.kind for document in documents)),
        command="\n".join(document.command for document in documents),
        date=" and ".join(dict.fromkeys(document.date for document in documents)),
        machine={
            (name if number == 1 else f"{name} of run {number}"): value
            for number, document in numbered
            for name, value in document.machine.items()
            if number == 1 or first.machine.get(name) != value
        },
        configuration={
            (name if number == 1 else f"{name} of run {number}"): value
            for number, document in numbered
            for name, value in document.configuration.items()
            if number == 1 or first.configuration.get(name) != value
        },
        slos=tuple(_merged_rules([rule for document in documents for rule in document.slos])),
        runs=tuple(run for document in documents for run in document.runs),
        goodput=tuple(found for document in documents for found in document.goodput or ()),
    )


def _merged_rules(rules: Sequence[SLOText]) -> Iterator[SLOText]:
    """Yield each rule once, with all rules that runs under it were planned for."""
    by_description: dict[str, list[SLOText]] = {}
    for rule in rules:
        by_description.setdefault(rule.description, []).append(rule)
    for description, same in by_description.items():
        planned_for = dict.fromkeys(rule.planned_for for rule in same if rule.planned_for is not None)
        yield SLOText(same[0].name, description, " and ".join(planned_for) or None)


def _ratio(scale: float) -> str:
    """Return 1/64 for such a fraction, and digits for other numbers."""
    return f"1/{1 / scale:.0f}" if abs(1 / scale - round(1 / scale)) < 1e-9 else f"{scale:.4g}"
