from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.metrics.backlog import MIN_REQUESTS, Backlog, backlog_of, deadline_of, used_capacity
from loong.workloads.metrics.record import CUT_OFF, TOO_LATE, RequestRecord, TokenUsage
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest


def served(times: Sequence[float], seconds: float, num_workers: float = 1.0, work: float = 1.0) -> Backlog:
    """Return the backlog of equal requests that one queue serves in order, each in `seconds`."""
    finishes, free = [], 0.0
    for time in times:
        free = max(free, time) + seconds / num_workers
        finishes.append(free)
    return backlog_of(times, finishes, [work] * len(times), finishes[-1])


def record(due: float, finish: float, num_tokens: int, error: str | None = None) -> RequestRecord:
    request = WorkloadRequest(due, RequestShape((TokenRun(0, num_tokens),), 1))
    times = () if error else (finish,)
    return RequestRecord(request, due, due, times, finish, TokenUsage(num_tokens, len(times)), error)


def test_the_backlog_is_what_has_arrived_and_is_not_finished() -> None:
    backlog = backlog_of([0.0, 1.0], [4.0, 2.0], [10.0, 3.0], end=4.0)
    at = dict(zip(backlog.times, backlog.device_seconds, strict=True))
    assert [at[time] for time in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0)] == [10.0, 10.0, 13.0, 13.0, 10.0, 0.0]


def test_it_is_stable_below_capacity_and_grows_above() -> None:
    times = [float(number) for number in range(4 * MIN_REQUESTS)]
    assert served(times, seconds=0.9).is_stable is True
    assert served(times, seconds=1.5).is_stable is False


def test_requests_that_are_still_in_time_are_no_sign_of_growth() -> None:
    times = [float(number) for number in range(MIN_REQUESTS)]
    finishes = [time + (100.0 if time > 30 else 0.5) for time in times]
    late = backlog_of(times, finishes, [1.0] * len(times), 200.0, deadlines=[time + 1 for time in times])
    in_time = backlog_of(times, finishes, [1.0] * len(times), 200.0, deadlines=[time + 99 for time in times])
    assert (late.is_stable, in_time.is_stable) == (False, True)
    assert late.device_seconds == in_time.device_seconds
    assert deadline_of(1.0, 0.5, 0.1, 11) == pytest.approx(2.5)
    assert deadline_of(1.0, inf, 0.1, 11) == -inf


def test_too_few_requests_and_requests_sent_at_once_are_not_judged() -> None:
    assert served([float(number) for number in range(MIN_REQUESTS - 1)], 1.5).is_stable is None
    assert served([0.0] * MIN_REQUESTS, 1.5).is_stable is None
    assert backlog_of([], [], [], end=0.0).is_stable is None


def test_a_run_that_ends_before_all_have_arrived_is_not_judged() -> None:
    times = [float(number) for number in range(MIN_REQUESTS)]
    cut = backlog_of(times, [inf] * len(times), [1.0] * len(times), end=times[-2])
    assert (cut.at_half, cut.at_end, cut.is_stable) == (MIN_REQUESTS / 2, None, None)


@given(
    gaps=st.lists(st.floats(0.0, 5.0), min_size=MIN_REQUESTS, max_size=80),
    factor=st.floats(0.1, 10.0),
)
def test_the_unit_of_work_does_not_matter(gaps: list[float], factor: float) -> None:
    times = [sum(gaps[:number]) for number in range(len(gaps))]
    plain, scaled = served(times, 2.0), served(times, 2.0, work=factor)
    assert scaled.device_seconds == pytest.approx([factor * work for work in plain.device_seconds])


def test_the_share_in_use_counts_what_completed() -> None:
    records = [record(0.0, 5.0, 10), record(1.0, 10.0, 20), record(2.0, 3.0, 400, error="HTTP 500")]
    used = used_capacity(records, lambda request: request.num_prompt_tokens / 10, 10.0, 2)
    assert used.share == pytest.approx(3.0 / 20)
    assert used_capacity(records, lambda _: 1.0, 10.0, None).share is None


@pytest.mark.parametrize("error", [CUT_OFF, TOO_LATE])
def test_what_has_not_ended_stays_in_the_backlog(error: str) -> None:
    records = [record(0.0, 1.0, 7, error=error)]
    used = used_capacity(records, lambda request: request.num_prompt_tokens, 2.0, 1)
    assert set(used.backlog.device_seconds) == {7.0}
