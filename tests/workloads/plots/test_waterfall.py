"""The picture of the requests that were late most: bars are steps that were recorded, colors are named."""

from typing import Any

import pytest
from matplotlib.colors import to_rgb

from loong.core.cluster_history import BatchSlice, RequestSpan
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.request import FinishReason
from loong.workloads.plots.style import PALE_INK, house_style
from loong.workloads.plots.waterfall import LateRequest, waterfall_figure
from loong.workloads.report.timeline_cells import Work


def batch(batch_id: int, group: tuple[int, ...], start: float, end: float) -> BatchSlice:
    return BatchSlice(batch_id, ESPGroup(group), Phase.MIXED, start, end, ("a", "b"), ())


STEPS = (batch(1, (0, 1, 2), 3.0, 5.0), batch(2, (0,), 5.5, 6.0), batch(3, (0, 1), 6.0, 8.0))
LONG = LateRequest(
    RequestSpan("a", 9000, 1.0, 5.0, 8.0, FinishReason.LENGTH),
    STEPS,
    3.0,
    True,
    "1.4 x its SLO",
    ("For 2.0 s: no room.",),
)
SHORT = LateRequest(RequestSpan("b", 90, 2.5, 5.0), STEPS[:1], None, False)


def panels_of(**late: list[LateRequest]) -> tuple[Any, list[Any]]:
    with house_style():
        figure = waterfall_figure(late)
    return figure, list(figure.axes)


def colored(panel: Any) -> list[tuple[tuple[float, ...], float, float]]:
    """Each bar with its color, beginning and end, but for those of waiting."""
    bars = [(bar.get_facecolor()[:3], bar.get_x(), bar.get_x() + bar.get_width()) for bar in panel.patches]
    return [bar for bar in bars if bar[0] != to_rgb(PALE_INK)]


def test_each_bar_is_a_step_that_was_recorded() -> None:
    _, (panel,) = panels_of(esp=[LONG, SHORT])
    decode, prefill = to_rgb(Work.DECODE.value), to_rgb(Work.LONG.value)
    assert colored(panel) == [
        (prefill, 2.0, 4.0),
        (decode, 4.5, 5.0),
        (decode, 5.0, 7.0),
        (to_rgb(Work.SHORT.value), 0.5, 2.5),
    ]


def test_every_color_of_bars_and_marks_is_in_the_legend_and_the_other_way_round() -> None:
    figure, panels = panels_of(esp=[LONG], replicas=[SHORT])
    drawn = {bar.get_facecolor()[:3] for panel in panels for bar in panel.patches}
    drawn |= {tuple(lines.get_color()[0][:3]) for panel in panels for lines in panel.collections}
    named = {
        to_rgb(handle.get_facecolor() if hasattr(handle, "get_facecolor") else handle.get_color())
        for handle in figure.legends[0].legend_handles
    }
    assert drawn == named


def test_policies_stand_side_by_side_with_one_scale_of_time() -> None:
    figure, (left, right) = panels_of(esp=[LONG], replicas=[SHORT])
    figure.draw_without_rendering()
    assert left.get_position().y0 == pytest.approx(right.get_position().y0)
    assert left.get_xlim() == right.get_xlim()


def test_it_says_how_late_a_request_was_and_why() -> None:
    _, (panel,) = panels_of(esp=[LONG])
    words = [text.get_text() for text in panel.texts]
    assert "1.4 x its SLO" in words
    assert "For 2.0 s: no room." in words


def test_a_run_without_requests_is_still_a_picture() -> None:
    _, (panel,) = panels_of(esp=[])
    assert [text.get_text() for text in panel.texts] == ["no request is known"]
