"""Chooses the seconds of a run to show closely: long prompts on several instances while others run."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.workloads.report.timeline_cells import long_prompt_of

NUM_BINS = 600
NUM_LONG_PROMPTS = 4  # of the slowest that a window has room for
MIN_SHARE, MAX_SHARE = 0.02, 0.5  # of the run
LEAD = 0.06  # of the window, before its first long prompt


def informative_window(history: ClusterHistory) -> tuple[float, float] | None:
    """Return the most informative seconds, None where the whole run shows no less.

    They begin a little before a long prompt does.
    """
    prompts = _long_prompts(history)
    length = NUM_LONG_PROMPTS * max((seconds for _, seconds in prompts), default=0.0)
    length = max(length, MIN_SHARE * history.end)
    if not prompts or length >= MAX_SHARE * history.end:
        return None
    width = history.end / NUM_BINS
    num_bins = round(length / width)
    sums = [(0.0, *accumulate(values)) for values in _seconds_by_bin(history, width)]

    def reported(start: float) -> float:
        """Score a window: high only if groups of several instances prefill while others run."""
        first = min(int(start / width), NUM_BINS - num_bins)
        wide, concurrent = (totals[first + num_bins] - totals[first] for totals in sums)
        return wide * concurrent

    start = max((max(begin - LEAD * length, 0.0) for begin, _ in prompts), key=reported)
    start = min(start, history.end - length)
    return (start, start + length) if reported(start) else None


def _long_prompts(history: ClusterHistory) -> Sequence[tuple[float, float]]:
    """Return the start and the duration of each long prompt's prefill."""
    threshold = long_prompt_of(history.batches)
    batches: dict[str, list[BatchSlice]] = {}
    for batch in history.batches:
        if 0 < threshold <= batch.longest_prompt:
            for request_id in batch.request_ids[:1]:
                batches.setdefault(request_id, []).append(batch)
    return [_extent(of_prompt) for of_prompt in batches.values()]


def _extent(batches: Sequence[BatchSlice]) -> tuple[float, float]:
    return (
        min(batch.started_at for batch in batches),
        sum(batch.ended_at - batch.started_at for batch in batches),
    )


def _seconds_by_bin(history: ClusterHistory, width: float) -> tuple[Sequence[float], Sequence[float]]:
    """Return the seconds of prefills on several instances, and of groups that overlap, in each bin.

    The second is a lower bound.
    """
    spread, busy = [0.0] * NUM_BINS, [0.0] * NUM_BINS
    for batch in history.batches:
        for index, seconds in _bins(batch, width).items():
            busy[index] += seconds
            if batch.group.dop > 1 and batch.longest_prompt:
                spread[index] += seconds
    one_at_a_time = width * 1.001  # and rounding errors
    return spread, [max(seconds - one_at_a_time, 0.0) for seconds in busy]


def _bins(batch: BatchSlice, width: float) -> Mapping[int, float]:
    """Return the seconds of a batch by bin."""
    first, last = (min(int(time / width), NUM_BINS - 1) for time in (batch.started_at, batch.ended_at))
    return {
        index: max(min(batch.ended_at, (index + 1) * width) - max(batch.started_at, index * width), 0.0)
        for index in range(first, last + 1)
    }
