from dataclasses import replace

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.workloads.report.informative_window import informative_window


def batch(name: str, group: tuple[int, ...], start: float, end: float, prompt: int = 0) -> BatchSlice:
    phase = Phase.PREFILL if prompt else Phase.DECODE
    return BatchSlice(int(start * 1e3), ESPGroup(group), phase, start, end, (name,), (), (), prompt, prompt)


LONG = batch("long", (0, 1, 2), 60.0, 64.0, 9000)
BESIDE = batch("short", (3,), 61.0, 63.0, 100)
ALONE = batch("lonely", (0, 1, 2, 3), 20.0, 24.0, 9000)
SHORTS = [batch(f"s{i}", (0,), float(i), i + 0.1, 50) for i in range(0, 60, 5)]


def test_the_window_holds_a_long_prompt_with_others_beside_it() -> None:
    window = informative_window(ClusterHistory((ALONE, LONG, BESIDE, *SHORTS)))
    assert window is not None
    start, end = window
    assert start < LONG.started_at < LONG.ended_at <= end
    assert end - start < 30


def test_without_anything_beside_a_long_prompt_the_whole_run_reports_as_much() -> None:
    assert informative_window(ClusterHistory((LONG, *SHORTS))) is None


def test_a_run_that_is_mostly_one_prompt_needs_no_window() -> None:
    assert informative_window(ClusterHistory((replace(LONG, ended_at=98.0), BESIDE, *SHORTS))) is None
    assert informative_window(ClusterHistory()) is None


def test_a_window_ends_with_the_run_at_the_latest() -> None:
    late = replace(LONG, started_at=95.0, ended_at=99.0)
    window = informative_window(
        ClusterHistory((late, replace(BESIDE, started_at=96.0, ended_at=98.0), *SHORTS))
    )
    assert window is not None
    assert window[1] <= 99.0 + 1e-9


def test_batches_that_follow_each_other_quickly_are_not_beside_each_other() -> None:
    steps = [batch(f"d{i}", (0,), 64.0 + i / 50, 64.0 + (i + 1) / 50) for i in range(100)]
    assert informative_window(ClusterHistory((LONG, *steps, *SHORTS))) is None
