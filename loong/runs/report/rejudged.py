"""Runs judged under other SLO rules than the one that they were made under."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf

import msgspec

from loong.core.errors import ConfigError
from loong.runs.goodput import of_sweep
from loong.workloads.distributions.prefill import PrefillFit
from loong.workloads.metrics.metrics import BUCKET_EDGES, BUCKET_NAMES
from loong.workloads.metrics.slo import Judged, LimitsOf, SLORule
from loong.workloads.report.run_document import GoodputRow, RunDocument, RunRow, SLOText


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Repetitions of a policy at a rate."""

    rate: float
    attains: bool


def rejudged(documents: Sequence[RunDocument], rules: Sequence[SLORule]) -> list[RunDocument]:
    """Return the documents with their runs judged under these rules as well.

    All use the first probed prefills.

    Raises `ConfigError` if a rule cannot be judged from the documents.
    """
    is_probed = any(rule.needs_prefill_time for rule in rules)
    prefill_time = next(filter(None, map(_probed, documents)), None) if is_probed else None
    found = list(documents)
    for rule in rules:
        if rule.judged is Judged.MEAN:
            raise ConfigError(f"--slo {rule.name} judges the means of a run; bench or simulate with it")
        if rule.needs_prefill_time and prefill_time is None:
            raise ConfigError(
                f"--slo {rule.name} depends on unloaded prefills, and no run that is drawn probed them; "
                "bench or simulate with it"
            )
        limits_of = rule.limits_of(prefill_time)
        found = [_under(document, rule, limits_of) for document in found]
    return found


def _probed(document: RunDocument) -> PrefillFit | None:
    probe = msgspec.json.decode(document.prefill_probe)
    return None if probe is None else msgspec.convert(probe["fit"], PrefillFit)


def _under(document: RunDocument, rule: SLORule, limits_of: LimitsOf) -> RunDocument:
    """Return the document with the runs of its first rule judged under another, unless it has that."""
    first, description = document.slos[0], rule.describe()
    if description in (text.description for text in document.slos):
        return document
    scale = document.length_scale
    runs = tuple(
        _judged(run, description, limits_of, document.attainment_goal, scale)
        for run in document.runs
        if run.slo == first.description
    )
    text = SLOText(rule.name, description, planned_for=first.name)
    goodput = document.goodput or ()
    if any(row.slo == first.description for row in goodput) and not any(run.is_cut_off for run in runs):
        goodput = (*goodput, *_goodput(runs, rule))
    return msgspec.structs.replace(
        document, slos=(*document.slos, text), runs=(*document.runs, *runs), goodput=goodput
    )


def _judged(run: RunRow, slo: str, limits_of: LimitsOf, goal: float, scale: float) -> RunRow:
    columns = zip(run.requested_input_lens, run.ttfts, run.tpots, run.e2els, strict=True)
    ratios = tuple(_ratio(limits_of, *request) for request in columns)
    is_met = [ratio is not None and ratio <= 1 for ratio in ratios]
    num_met = sum(is_met)
    share = num_met / run.num_prompts if run.num_prompts else None
    duration = run.number("duration")
    return msgspec.structs.replace(
        run,
        slo=slo,
        slo_ratios=ratios,
        slo_attainment=share,
        attains=not run.is_cut_off and num_met >= ceil(goal * run.num_prompts),
        by_prompt_length=tuple(
            bucket | {"slo_attainment": _share_of(str(bucket["bucket"]), run, is_met, scale)}
            for bucket in run.by_prompt_length
        ),
        numbers=run.numbers
        | {
            "is_per_class": False,
            "slo": slo,
            "slo_attainment": share,
            "request_goodput": num_met / duration if duration else 0.0,
        },
    )


def _ratio(
    limits_of: LimitsOf, num_tokens: int, ttft: float | None, tpot: float | None, e2el: float | None
) -> float | None:
    """Return the greatest latency relative to its bound; None if the request did not complete."""
    if ttft is None or e2el is None:
        return None
    limits = limits_of(num_tokens)
    return max(ttft / limits.ttft, (tpot or 0.0) / limits.tpot, e2el / limits.e2el)


def _share_of(bucket: str, run: RunRow, is_met: Sequence[bool], scale: float) -> float | None:
    place = BUCKET_NAMES.index(bucket)
    low, high = (edge * scale for edge in BUCKET_EDGES[place : place + 2])
    inside = [
        met for met, length in zip(is_met, run.requested_input_lens, strict=True) if low <= length < high
    ]
    return sum(inside) / len(inside) if inside else None


def _goodput(runs: Sequence[RunRow], rule: SLORule) -> Iterator[GoodputRow]:
    def policy(run: RunRow) -> str:
        return run.policy

    for name, of_policy in groupby(sorted(runs, key=policy), policy):
        by_rate: dict[float, list[bool]] = {}
        for run in of_policy:
            by_rate.setdefault(run.request_rate, []).append(run.attains)
        if inf in by_rate:
            continue
        attempts = [_Attempt(rate, 2 * sum(met) > len(met)) for rate, met in sorted(by_rate.items())]
        found = of_sweep(name, rule, attempts)
        yield GoodputRow(name, rule.describe(), found.rate, found.too_high_rate)
