"""The Pareto frontier, and the points of runs that it is of."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_documents import run_row, write_run

from loong.workloads.report.pareto import (
    Devices,
    DeviceUnit,
    Point,
    SpeedRun,
    curves_of,
    frontier,
    pareto_curves,
)
from loong.workloads.report.run_document import by_rule

FEW = st.integers(0, 6).map(float)  # so that coordinates and points are often equal
POINTS = st.lists(st.tuples(FEW, FEW))
TWO_GPUS, TWO_RANKS = Devices(2, DeviceUnit.GPU), Devices(2, DeviceUnit.RANK)


def dominates(a: Point, b: Point) -> bool:
    return a[0] >= b[0] and a[1] >= b[1] and a != b


@given(POINTS)
def test_no_point_of_a_frontier_is_dominated_and_every_other_one_is(points: list[Point]) -> None:
    kept = frontier(points)
    for point in points:
        assert (point in kept) != any(dominates(other, point) for other in points)
    assert all(kept.count(point) == points.count(point) for point in kept)


@given(POINTS.flatmap(lambda points: st.tuples(st.just(points), st.permutations(points))))
def test_a_frontier_does_not_depend_on_the_order_of_points(both: tuple[list[Point], list[Point]]) -> None:
    points, shuffled = both
    assert frontier(points) == frontier(shuffled)


@given(POINTS)
def test_along_a_frontier_more_speed_costs_throughput(points: list[Point]) -> None:
    kept = frontier(points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert [y for _, y in kept] == sorted((y for _, y in kept), reverse=True)


def run(policy: str, rate: float, tpot: float | None, throughput: float, devices: Devices | None) -> SpeedRun:
    return SpeedRun(policy, rate, tpot, throughput, devices)


def test_repetitions_are_the_median_and_the_range_of_a_point() -> None:
    runs = [run("esp", 2.0, tpot, 10 / tpot, TWO_GPUS) for tpot in (0.02, 0.01, 0.05)]
    (point,) = pareto_curves(runs).points
    assert point.speed == pytest.approx((50, 20, 100))
    assert point.throughput == pytest.approx((250, 100, 500))


def test_a_frontier_is_of_a_policy_and_one_is_of_all() -> None:
    runs = [
        run("slow", 1.0, 0.1, 80, TWO_GPUS),
        run("slow", 2.0, 0.2, 160, TWO_GPUS),
        run("fast", 2.0, 0.05, 300, TWO_GPUS),
        run("fast", 1.0, 0.05, 200, TWO_GPUS),
        run("fast", 4.0, 0.25, 300, TWO_GPUS),
    ]
    points = pareto_curves(runs).points
    assert [(point.policy, point.rate, point.frontiers) for point in points] == [
        ("slow", 1.0, "its own"),
        ("slow", 2.0, "its own"),
        ("fast", 1.0, "-"),
        ("fast", 2.0, "of all"),
        ("fast", 4.0, "-"),
    ]


@pytest.mark.parametrize(
    ("devices", "unit", "throughput"),
    [
        ((TWO_GPUS, TWO_GPUS), DeviceUnit.GPU, 50),
        ((TWO_RANKS, TWO_RANKS), DeviceUnit.RANK, 50),
        ((TWO_GPUS, None), DeviceUnit.SERVER, 100),
        ((TWO_GPUS, TWO_RANKS), DeviceUnit.SERVER, 100),
        ((None, None), DeviceUnit.SERVER, 100),
    ],
)
def test_throughput_is_per_device_only_if_those_of_all_servers_are_known_and_alike(
    devices: tuple[Devices | None, ...], unit: DeviceUnit, throughput: float
) -> None:
    curves = pareto_curves([run(f"server {i}", 1.0, 0.1, 100, found) for i, found in enumerate(devices)])
    assert curves.unit is unit
    assert [point.throughput for point in curves.points] == [(throughput,) * 3] * 2


@pytest.mark.parametrize("tpot", [None, 0.0])
def test_a_run_whose_answers_came_in_one_piece_has_no_speed(tpot: float | None) -> None:
    assert pareto_curves([run("esp", 1.0, tpot, 100, TWO_GPUS)]).points == ()


def test_a_document_is_read_back_as_it_was_written_and_runs_that_were_cut_off_are_left_out(
    tmp_path: Path,
) -> None:
    found = run("esp", 2.0, 0.004, 31.5, TWO_GPUS)
    row = run_row("esp", median_tpot_ms=4.0) | found.as_json()
    (runs,) = by_rule(write_run(tmp_path, [row, run_row("esp", request_rate=9.0, is_cut_off=True)]))
    assert curves_of(runs) == pareto_curves([found])
    (older,) = by_rule(write_run(tmp_path, [run_row("esp")]))
    assert curves_of(older).unit is DeviceUnit.SERVER
