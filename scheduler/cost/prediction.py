"""Predictions of many samples by many sets of coefficients, by the cost model's formula as machine code."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from loong.core.cost.work import InstanceWork, Phase, StepWork
from loong.scheduler.common.compiled import compiled
from loong.scheduler.cost.cost_model import (
    Coefficients,
    WorkCostModel,
    attention_seconds,
    group_seconds,
    instance_seconds,
)
from loong.scheduler.cost.least_squares import Array

_COEFFICIENTS = np.dtype([(field.name, np.float64) for field in fields(Coefficients)])
_PART = np.dtype(
    [(field.name, np.float64) for field in fields(InstanceWork)]
    + [("is_captured", np.bool_), ("delay", np.float64), ("crowd", np.float64)]
)
_STEP = np.dtype(
    [("num_others", np.float64), ("num_requests", np.float64)]
    + [
        (name, np.bool_)
        for name in ("is_first", "starts_idle", "is_lease", "has_exchange", "has_ring", "is_mixed")
    ]
    + [("members", np.int64), ("end", np.int64)]  # in the table of instances, holders before members
)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Steps as tables of counts, for many sets of coefficients at once."""

    steps: NDArray[np.void]
    parts: NDArray[np.void]  # of each step, one of each instance
    delays: Array  # [steps], of links between hosts
    overlap: float

    @classmethod
    def of(cls, model: WorkCostModel, steps: Sequence[StepWork]) -> "StepTable":
        """Lay out the counts of `steps`; captured steps and overlaps are as in `model`."""
        delays = np.array([model.network.seconds(step) for step in steps])
        if model.network.host_ids:
            steps = list(map(model.network.slowed, steps))
        ends = np.cumsum([len(step.holders) + len(step.instances) for step in steps]).tolist()
        rows = [_row(step, end) for step, end in zip(steps, ends, strict=True)]
        parts = [
            (*astuple(model.windows.of(part)), has_graphs and model.has_captured(part), delay, crowd)
            for step in steps
            for has_graphs in (model.replays(step),)
            for part, delay, crowd in (
                *_held(step, model),
                *((part, 0.0, 1.0) for part in step.instances.values()),
            )
        ]
        return cls(_table(rows, _STEP), _table(parts, _PART), delays, model.overlap)

    def seconds(self, coefficients: Array) -> Array:
        """Return the seconds [sets, steps] of each step by each set of `coefficients` [sets, names]."""
        sets = np.ascontiguousarray(coefficients).view(_COEFFICIENTS)[:, 0].view(np.recarray)
        seconds = np.zeros((len(sets), len(self.steps)))
        _predict(sets, self.steps, self.parts, self.overlap, seconds)
        return seconds + self.delays


def _held(step: StepWork, model: WorkCostModel) -> Iterator[tuple[InstanceWork, float, float]]:
    """Yield the work of each holder, the seconds that its own batch delays it, and the factor by which reads
    of other groups do.
    """
    for instance_id, part in step.holders.items():
        delay = 0.0 if instance_id in step.idle_holder_ids else model.lane.delay
        yield part, delay, 1 + model.lane.crowding * step.read_shares.get(instance_id, 0.0)


def _table(rows: Sequence[tuple[float, ...]], kind: np.dtype[np.void]) -> NDArray[np.void]:
    """Return rows whose fields are attributes, as the cost model reads them."""
    return np.array(rows, kind).view(np.recarray)


def _row(step: StepWork, end: int) -> tuple[float, ...]:
    is_mixed = not step.is_lease and step.phase is Phase.MIXED
    return (
        step.group.dop - 1,
        step.num_requests,
        step.is_first,
        step.starts_idle,
        step.is_lease,
        step.has_exchange,
        step.has_ring,
        is_mixed,
        end - len(step.instances),
        end,
    )


_group_seconds = compiled(group_seconds)
_attention_seconds = compiled(attention_seconds)
_instance_seconds = compiled(instance_seconds)


@compiled
def _predict(
    sets: NDArray[np.void],
    steps: NDArray[np.void],
    parts: NDArray[np.void],
    overlap: float,
    seconds: Array,  # [sets, steps], written
) -> None:
    for i in range(len(sets)):
        start = 0
        for j in range(len(steps)):
            slowest = served = 0.0
            for k in range(start, steps[j].members):
                part = _instance_seconds(sets[i], parts[k], overlap, parts[k].is_captured)
                served = max(served, part * parts[k].crowd + parts[k].delay)
            for k in range(steps[j].members, steps[j].end):
                part = _instance_seconds(sets[i], parts[k], overlap, parts[k].is_captured)
                part += max(0.0, served - _attention_seconds(sets[i], parts[k]))
                slowest = max(slowest, part)
            step = steps[j]
            seconds[i, j] = slowest + _group_seconds(sets[i], step, step.num_others, step.is_mixed)
            start = steps[j].end
