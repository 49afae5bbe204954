"""Shortens a long trail by joining steps that continue each other."""

from collections.abc import Iterable

from msgspec.structs import replace

from loong.observability.decision_log.lines import Reason
from loong.observability.decision_log.story.steps import ComputedBatches, Move, StoryStep, summed


def folded(steps: Iterable[StoryStep]) -> tuple[StoryStep, ...]:
    """Return the steps, with batches joined that ran on the same instances, and migrations of one moment."""
    result: list[StoryStep] = []
    for step in steps:
        joined = _join(result[-1], step) if result else None
        if joined is None:
            result.append(step)
        else:
            result[-1] = joined
    return tuple(result)


def _join(earlier: StoryStep, later: StoryStep) -> StoryStep | None:
    """Return both steps as one, or None if they differ."""
    match earlier, later:
        case ComputedBatches(), ComputedBatches() if _shape(earlier) == _shape(later):
            reasons = _each_kind_once(earlier.reasons, later.reasons)
            waited_for = summed((*earlier.waited_for, *later.waited_for))
            return replace(
                earlier,
                parts=earlier.parts + later.parts,
                waited_for=waited_for,
                reasons=reasons,
                num_repaired=earlier.num_repaired + later.num_repaired,
            )
        case Move(), Move() if earlier.time == later.time and earlier.is_committed == later.is_committed:
            ends = [move.until for move in (earlier, later) if move.until is not None]
            return replace(
                earlier,
                until=max(ends, default=None),
                routes=earlier.routes + later.routes,
                reasons=_each_kind_once(earlier.reasons, later.reasons),
            )
        case _:
            return None


def _shape(run: ComputedBatches) -> tuple[str, bool, bool, frozenset[int], frozenset[int]]:
    is_repair = run.num_repaired > 0
    return run.phase, run.is_recomputed, is_repair, frozenset(run.instance_ids), frozenset(run.holder_ids)


def _each_kind_once(earlier: Iterable[Reason], later: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return the first reasons of each kind. Later ones repeat them for the next batch."""
    kinds = {reason.kind for reason in earlier}
    return (*earlier, *(reason for reason in later if reason.kind not in kinds))
