"""Judgment of runs by length class, on requests that nothing served."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from loong.core.errors import ConfigError
from loong.runs.run import PolicyRun, RunKey, allowed_misses, check_classes
from loong.workloads.metrics.backlog import Backlog, UsedCapacity
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.record import RequestRecord, TokenUsage
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

RULE = parse_slo("ttft:1000")
ASKED = RunKey("esp", RULE, 1.0, is_per_class=True)
STABLE = UsedCapacity(Backlog((), (), 1.0, 1.0, 0.0), 0.5)
SHORT, LONG = 100, 200_000


def requests(counts: Mapping[int, int]) -> list[WorkloadRequest]:
    shapes = [RequestShape((TokenRun(0, n),), 1) for n, count in counts.items() for _ in range(count)]
    return [WorkloadRequest(0.0, shape) for shape in shapes]


def run(sent: Mapping[int, int], late: Mapping[int, int], used: UsedCapacity | None = STABLE) -> PolicyRun:
    """Return a run with these numbers of requests by prompt length, some of them late."""
    left, records = dict(late), []
    for request in requests(sent):
        is_late = left.get(request.num_prompt_tokens, 0) > 0
        if is_late:
            left[request.num_prompt_tokens] -= 1
        time = 9.0 if is_late else 0.5
        usage = TokenUsage(request.num_prompt_tokens, 1)
        records.append(RequestRecord(request, 0.0, 0.0, (time,), time, usage, None))
    metrics = compute_metrics(records, RULE.limits_of(None))
    return PolicyRun(ASKED, metrics, {}, ServerCounters(), False, used, None)


def test_every_class_must_meet_the_goal() -> None:
    assert run({SHORT: 100, LONG: 20}, {SHORT: 10, LONG: 2}).attains
    assert not run({SHORT: 1_000, LONG: 20}, {LONG: 3}).attains


def test_a_class_of_few_requests_is_reported_but_not_judged() -> None:
    found = run({SHORT: 100, LONG: 19}, {LONG: 19})
    assert found.attains
    assert found.metrics.buckets[-1].attainment == 0.0
    assert not run({SHORT: 19}, {}).attains


def test_a_backlog_that_grows_does_not_attain_and_an_unknown_one_does_not_count() -> None:
    grown = replace(STABLE, backlog=replace(STABLE.backlog, at_end=2.0))
    unknown = replace(STABLE, backlog=replace(STABLE.backlog, at_end=None))
    assert not run({SHORT: 100}, {}, grown).attains
    assert run({SHORT: 100}, {}, unknown).attains
    assert run({SHORT: 100}, {}, None).attains


def test_the_json_says_how_a_run_is_judged() -> None:
    found = run({SHORT: 100}, {}).as_json()
    assert (found["is_per_class"], found["is_stable"], found["capacity_share"]) == (True, True, 0.5)
    assert found["backlog"] == {
        "times": [],
        "device_seconds": [],
        "at_half": 1.0,
        "at_end": 1.0,
        "allowance": 0.0,
    }


def test_a_class_is_lost_with_the_first_miss_too_many_and_small_ones_never_are() -> None:
    sent = requests({SHORT: 100, LONG: 19})
    misses = allowed_misses(sent, ASKED, length_scale=1.0)
    for _ in range(19):
        misses.add(LONG)
    for _ in range(10):
        misses.add(SHORT)
    assert not misses.is_hopeless
    misses.add(SHORT)
    assert misses.is_hopeless


def test_classes_scale_with_the_lengths() -> None:
    sent = requests({63: 20, 64: 20})
    misses = allowed_misses(sent, ASKED, length_scale=1 / 64)
    assert misses.allowed[:2] == (2, 2)
    misses = allowed_misses(sent, replace(ASKED, is_per_class=False), length_scale=1 / 64)
    assert misses.allowed == (4,)


def test_what_cannot_be_judged_by_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="largest has 19; give more --num-requests"):
        check_classes([RULE], requests({SHORT: 19, LONG: 19}), 1.0)
    with pytest.raises(ConfigError, match="means of a run"):
        check_classes([parse_slo("loongserve-10-mixed")], requests({SHORT: 20}), 1.0)
