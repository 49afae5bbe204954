"""Pictures of runs: what they say, as text of SVG files."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from run_documents import run_row, sweep, write_run

from loong.workloads.plots.curves import (
    attainment_by_rate_figure,
    attainment_by_scale_figure,
    latency_by_rate_figure,
)
from loong.workloads.plots.goodput import GoodputBar, goodput_figure
from loong.workloads.plots.latencies import latency_cdf_figure, ttft_by_length_figure
from loong.workloads.plots.pareto import pareto_figure
from loong.workloads.plots.style import POLICY_STYLES, house_style, styles_of, write_figure
from loong.workloads.report.run_document import RuleRuns, by_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FIGURES = {
    attainment_by_rate_figure: ("requests per second", "SLO attainment (% of all sent)", "goal: 50 %"),
    attainment_by_scale_figure: ("scale of every bound", "SLO attainment (% of all sent)", "goal: 50 %"),
    latency_by_rate_figure: ("median TTFT, logarithmic (ms, s)", "P99 TPOT", "requests per second"),
    latency_cdf_figure: ("TTFT, logarithmic (ms, s)", "TPOT", "(% of all sent)", "at 4 req/s"),
    pareto_figure: ("output tokens/s/user, 1 / median TPOT", "output tokens/s/server", "1/s"),
    ttft_by_length_figure: (
        *("&lt; 4k", "4 sent"),
        *("tokens before scaling by 1/64", "TTFT, logarithmic (ms, s)", "point: one request"),
    ),
}


def drawn(draw: Callable[[RuleRuns], "Figure"], runs: RuleRuns) -> str:
    with house_style():
        return svg_of(draw(runs))


def points(panel: "Axes") -> list[tuple[float, float]]:
    """Of the first line."""
    xs, ys = np.asarray(panel.lines[0].get_xydata()).T.tolist()
    return list(zip(xs, ys, strict=True))


def svg_of(figure: "Figure") -> str:
    text = StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()


@pytest.mark.parametrize(("draw", "words"), FIGURES.items())
def test_a_picture_names_its_axes_units_and_policies(
    tmp_path: Path, draw: Callable[[RuleRuns], "Figure"], words: tuple[str, ...]
) -> None:
    (runs,) = by_rule(sweep(tmp_path))
    text = drawn(draw, runs)
    for word in (*words, "esp", "static-sp", POLICY_STYLES["esp"].color.lower()):
        assert word in text


@pytest.mark.parametrize("draw", FIGURES)
def test_runs_of_which_nothing_is_known_are_still_a_picture(
    tmp_path: Path, draw: Callable[[RuleRuns], "Figure"]
) -> None:
    row = run_row("esp", is_cut_off=True, by_prompt_length=[], ttfts=[], tpots=[], slo_ratios=[])
    (runs,) = by_rule(write_run(tmp_path, [row]))
    assert "<svg" in drawn(draw, runs)


def test_repetitions_are_a_band_and_a_single_run_has_none(tmp_path: Path) -> None:
    (repeated,) = by_rule(sweep(tmp_path))
    alone = RuleRuns(
        repeated.rule, 0.5, tuple(run for run in repeated.runs if run.repeat == 0), repeated.goodput
    )
    band = 'id="FillBetweenPolyCollection'
    assert band in drawn(latency_by_rate_figure, repeated)
    assert band not in drawn(latency_by_rate_figure, alone)


def test_a_pareto_curve_is_the_frontier_and_dominated_points_are_hollow(tmp_path: Path) -> None:
    medians = ((1.0, 10.0, 100.0), (2.0, 20.0, 300.0), (4.0, 25.0, 200.0))  # req/s, TPOT in ms, tokens/s
    rows = [
        run_row(
            "esp",
            request_rate=rate,
            median_tpot_ms=tpot,
            output_throughput=throughput,
            num_devices=2,
            device_unit="GPU",
        )
        for rate, tpot, throughput in medians
    ]
    (runs,) = by_rule(write_run(tmp_path, rows))
    with house_style():
        (panel,) = pareto_figure(runs).axes
    hollow, curve = (np.asarray(line.get_xydata()).tolist() for line in panel.lines)
    assert hollow == [[40.0, 100.0]]
    assert curve == [[50.0, 150.0], [100.0, 50.0]]
    assert panel.get_ylabel() == "output tokens/s/GPU"


def test_a_range_of_few_requests_is_its_requests_and_one_of_many_their_p99(tmp_path: Path) -> None:
    row = run_row("esp", num_prompts=104, requested_input_lens=[5, 50, 63, 7_000])
    few = {"bucket": "< 4k", "sent": 4, "median_ttft_ms": 23.25, "p99_ttft_ms": 23.25}
    row["by_prompt_length"] = [few, few | {"bucket": "4-32k", "sent": 100}]
    (runs,) = by_rule(write_run(tmp_path, [row]))
    with house_style():
        (panel,) = ttft_by_length_figure(runs).axes
    points, median, high, middle = (np.asarray(line.get_xydata()).T[1].tolist() for line in panel.lines)
    assert points == pytest.approx([10.0, 20.0, 40.0])  # each that is shorter than 4k / 64 and did not fail
    assert (median, high, middle) == ([23.25], [23.25], [23.25])
    assert "point: one request" in panel.get_ylabel()
    assert "end of the line: P99" in panel.get_ylabel()


def test_a_time_of_zero_counts_and_is_not_drawn(tmp_path: Path) -> None:
    row = run_row("esp", completed=4, failed=0, ttfts=[0.01] * 4, tpots=[0.0, 0.0, 0.004, 0.008])
    (runs,) = by_rule(write_run(tmp_path, [row]))
    with house_style():
        _, tpot = latency_cdf_figure(runs).axes
    assert points(tpot) == [(4.0, 75.0), (8.0, 100.0)]


def test_failed_requests_keep_a_curve_below_all(tmp_path: Path) -> None:
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp")]))
    with house_style():
        ttft, tpot = latency_cdf_figure(runs).axes
    assert points(ttft)[-1] == (40.0, 75.0)
    assert points(tpot)[-1] == (5.0, 50.0)


def test_a_stricter_slo_is_met_by_fewer(tmp_path: Path) -> None:
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp", 2.0)]))
    with house_style():
        (panel,) = attainment_by_scale_figure(runs).axes
    shares = dict(points(panel))
    assert (shares[0.25], shares[0.5], shares[1.0], shares[2.0]) == (0.0, 25.0, 50.0, 75.0)


def test_goodput_is_reported_beside_its_bar() -> None:
    bars = [GoodputBar("esp", 4.25, is_at_least=True), GoodputBar("tp", 0.5), GoodputBar("replicas", 0.0)]
    with house_style():
        text = svg_of(
            goodput_figure(
                [("mixed", bars), ("leval", bars), ("lveval", bars[:1])], "P90 goodput: requests per second"
            )
        )
    for words in ("mixed", "lveval", "≥ 4.25", "0.5", "none found", "P90 goodput: requests per second", "tp"):
        assert words in text


def test_a_policy_looks_the_same_whatever_it_is_drawn_with() -> None:
    names = ["tp", "http://b", "esp", "http://a"]
    styles = styles_of(names)
    assert styles["esp"] == styles_of(["esp"])["esp"] == POLICY_STYLES["esp"]
    assert styles == {name: styles_of(reversed(names))[name] for name in names}
    assert len(set(styles.values())) == len(names)


def test_all_policies_are_distinguished() -> None:
    assert len(set(POLICY_STYLES.values())) == len(POLICY_STYLES)


def test_simulated_runs_look_like_the_policy_that_they_are_of() -> None:
    styles = styles_of(["esp", "esp (simulated)"])
    assert styles["esp (simulated)"].color == styles["esp"].color
    assert styles["esp (simulated)"] != styles["esp"]


def test_the_names_of_many_policies_stay_within_the_picture(tmp_path: Path) -> None:
    names = [
        f"{policy}{kind}" for kind in ("", " (simulated)") for policy in ("esp-paper", "disaggregated-2")
    ]
    (runs,) = by_rule(write_run(tmp_path, [run_row(name) for name in (*names, "tp", "chunked-replicas")]))
    with house_style():
        figure = attainment_by_rate_figure(runs)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    picture, names_box = figure.bbox, legend.get_window_extent()
    assert picture.x0 <= names_box.x0 < names_box.x1 <= picture.x1


def test_the_rates_that_were_run_are_named_on_the_axis(tmp_path: Path) -> None:
    rows = [run_row("esp", request_rate=rate) for rate in (0.25, 3.5, 16.0)]
    (runs,) = by_rule(write_run(tmp_path, rows))
    with house_style():
        (panel,) = attainment_by_rate_figure(runs).axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.25", "3.5", "16"]


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    (runs,) = by_rule(sweep(tmp_path))
    paths = [tmp_path / "a.png", tmp_path / "a.svg"]
    with house_style():
        write_figure(attainment_by_rate_figure(runs), paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
