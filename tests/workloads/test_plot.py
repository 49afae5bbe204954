from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from loong.workloads.plot import COLORS, plot_timelines
from loong.workloads.timeline import KVSample, Timeline, TimelineSlice


def elastic() -> Timeline:
    """A prefill on four instances whose decode goes on with two, beside a lone batch."""
    prefill = [TimelineSlice(i, 0.0, 2.0, (0, 1, 2, 3), "prefill") for i in range(4)]
    decode = [
        TimelineSlice(i, start, start + 0.015, (0, 1), "decode")
        for start in np.arange(2.0, 3.0, 0.02).tolist()
        for i in (0, 1)
    ]
    lone = TimelineSlice(2, 2.0, 2.8, (2,), "mixed")
    samples = [KVSample(i, time, int(1000 * time) * (i + 1)) for time in (0.0, 1.0, 2.0) for i in range(4)]
    return Timeline((*prefill, *decode, lone), tuple(samples))


def colors_in(path: Path) -> set[str]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return {f"#{red:02X}{green:02X}{blue:02X}" for red, green, blue in np.unique(pixels, axis=0)}


def test_the_picture_is_a_png_of_a_size_to_look_at(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot_timelines({"esp": elastic()}, [path])
    height, width, _ = imread(path).shape
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 300 <= height <= 1000
    assert 1200 <= width <= 2400
    assert COLORS[2] in colors_in(path)  # the prefill's group, third by size


def test_each_policy_adds_a_panel_of_the_same_width(tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot_timelines({"esp": elastic()}, [one])
    plot_timelines({"esp": elastic(), "static-sp": elastic()}, [two])
    assert imread(two).shape[1] == imread(one).shape[1]
    assert imread(two).shape[0] > 1.5 * imread(one).shape[0]


def test_the_svg_names_policies_groups_phases_and_units(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    plot_timelines({"esp": elastic(), "static-sp": elastic()}, [path])
    text = path.read_text()
    for words in ("static-sp", "DoP 4 prefill", "DoP 2 decode", "0+1+2+3", "(s)", "8,000 tokens"):
        assert words in text


def test_the_labels_of_steps_too_short_for_words_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    short = TimelineSlice(0, 1.0, 1.01, (0,), "prefill")
    plot_timelines({"esp": Timeline((short, TimelineSlice(1, 0.0, 4.0, (1, 2), "decode")), ())}, [path])
    assert "DoP 2 decode" in path.read_text()
    assert "DoP 1 prefill" not in path.read_text()


@pytest.mark.parametrize("timeline", [Timeline((), ()), Timeline((), (KVSample(0, 0.0, 0),))])
def test_a_run_of_nothing_is_still_a_picture(tmp_path: Path, timeline: Timeline) -> None:
    path = tmp_path / "timeline.png"
    plot_timelines({"esp": timeline}, [path])
    assert path.stat().st_size > 1000


def test_more_groups_than_colors_are_told_apart(tmp_path: Path) -> None:
    groups = [(i, i + 1) for i in range(10)]
    slices = tuple(TimelineSlice(0, float(i), i + 0.9, group, "prefill") for i, group in enumerate(groups))
    path = tmp_path / "timeline.svg"
    plot_timelines({"esp": Timeline(slices, ())}, [path])
    assert "pattern" in path.read_text()  # an SVG hatch
