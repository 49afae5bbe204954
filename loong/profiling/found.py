"""The result of a profile: the fit, its errors on held-out samples, and the measured ranges."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np
import torch

import loong
from loong.core.cost.work import InstanceWork
from loong.hardware.cost_model_file import FORMAT, AttentionTiles, CostModelFile, Errors
from loong.hardware.devices import DEVICES
from loong.hardware.machine import machine_facts
from loong.profiling.links import measured_links
from loong.profiling.measure import Measured
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.fit import (
    NAMES,
    BatchSample,
    Fit,
    MigrationSample,
    Sample,
    contributions,
    fit,
    relative_errors,
)
from loong.scheduler.cost.network import Network
from loong.scheduler.cost.roofline import ModelShape

NUM_DIGITS = 6
SIZES = ((0.0, "0 to 2 ms"), (2e-3, "2 to 5 ms"), (5e-3, "5 to 20 ms"), (20e-3, "above 20 ms"))


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances that were measured."""

    model: str
    shape: ModelShape
    tp_size: int
    device: str
    num_instances: int
    host_ids: tuple[int, ...] = ()


def found(
    instances: Instances,
    prior: WorkCostModel,
    measured: Sequence[Measured],
    tiles: AttentionTiles | None = None,
) -> CostModelFile:
    """Fit the samples, and return the result with its errors."""
    moves = [m.sample for m in measured if isinstance(m.sample, MigrationSample)]
    shape, usual = instances.shape, DEVICES[instances.device].links
    links = measured_links(moves, instances.host_ids, shape.kv_bytes / instances.tp_size, usual)
    prior = replace(prior, network=Network.of(instances.host_ids, links, shape.num_layers))
    result = fit(prior, [m.sample for m in measured if not m.is_held_out])
    held_out = [m.sample for m in measured if m.is_held_out]
    return CostModelFile(
        format=FORMAT,
        model=instances.model,
        shape=asdict(instances.shape),
        tp_size=instances.tp_size,
        device=instances.device,
        num_instances=instances.num_instances,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "loong": loong.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        machine=machine_facts(),
        coefficients={n: _rounded(v) for n, v in asdict(result.model.coefficients).items()},
        overlap=result.model.overlap,
        undetermined=list(result.undetermined),
        graph_limits=asdict(DEVICES[instances.device].graph_limits),
        host=asdict(result.model.host),
        lane={n: _rounded(v) for n, v in asdict(result.model.lane).items()},
        ranges=ranges(m.sample for m in measured),
        repeat_spread=round(median(m.spread for m in measured), 4),
        errors=error_table(result, held_out),
        links={name: {n: _rounded(v) for n, v in rates.items()} for name, rates in asdict(links).items()},
        attention_tiles=tiles,
    )


def error_table(result: Fit, samples: Sequence[Sample]) -> dict[str, Errors]:
    """Return the errors of all samples, by kind, by DoP, by the term of most of the time, and by size."""
    errors = np.abs(relative_errors(result.model, samples))
    terms = contributions(result.model, samples).argmax(axis=1)
    groups: dict[tuple[int, str], list[float]] = {}
    for sample, term, error in zip(samples, terms, errors, strict=True):
        for rank, label in enumerate(_labels(sample, NAMES[term])):
            if label is not None:
                groups.setdefault((rank, label), []).append(float(error))
    return {label: _errors(groups[rank, label]) for rank, label in sorted(groups)}


def _labels(sample: Sample, term: str) -> tuple[str | None, ...]:
    """Return the rows of the table that a sample belongs to, one of each part that has any."""
    size = next(name for least, name in reversed(SIZES) if sample.seconds >= least)
    if isinstance(sample, MigrationSample):
        return "all", "migration", None, f"mostly {term}", size
    (work, _), *later = sample.steps
    kind = "lease" if later else work.phase.value
    return "all", kind, f"DoP {work.group.dop}", f"mostly {term}", size


def _rounded(value: float) -> float:
    """Return a value rounded to the digits that are significant."""
    return float(f"{value:.{NUM_DIGITS}g}")


def _errors(errors: Sequence[float]) -> Errors:
    values = (np.mean(errors), np.quantile(errors, 0.95), np.max(errors))
    return Errors(len(errors), *(round(float(value), 4) for value in values))


def ranges(samples: Iterable[Sample]) -> dict[str, tuple[float, float]]:
    """Return the least and the greatest of each count of an instance's work, and of DoP and tokens moved."""
    seen: dict[str, list[float]] = {}
    for sample in samples:
        if isinstance(sample, BatchSample):
            for work, _ in sample.steps:
                seen.setdefault("dop", []).append(work.group.dop)
                for part in work.instances.values():
                    for field in fields(InstanceWork):
                        seen.setdefault(field.name, []).append(getattr(part, field.name))
        else:
            seen.setdefault("num_moved_keys", []).append(sample.num_tokens)
    return {name: (min(values), max(values)) for name, values in seen.items()}
