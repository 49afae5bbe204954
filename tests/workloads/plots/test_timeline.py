from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread
from matplotlib.patches import Patch

from loong.core.cluster_history import BatchSlice, ChangeKind, ClusterHistory, InstanceChange, RequestSpan
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.request import FinishReason
from loong.workloads.palette import PINK
from loong.workloads.plots.style import house_style, write_figure
from loong.workloads.plots.timeline import kv_strip, timelines_figure
from loong.workloads.report.timeline_cells import (
    NUM_COLUMNS,
    Scale,
    Work,
    kv_shares,
    long_prompt_of,
    rows_of,
    served_stretches,
)

RGBA: TypeAlias = tuple[float, float, float, float]
CAPACITY = dict.fromkeys(range(4), 8000)


def piece(batch_id: int, group: tuple[int, ...], phase: Phase, start: float, end: float) -> BatchSlice:
    held = tuple((i, 1000 * (i + 1)) for i in group)
    return BatchSlice(batch_id, ESPGroup(group), phase, start, end, ("a",), held, held)


def elastic() -> ClusterHistory:
    """Return a long prefill on four instances whose decode goes on with two, while short requests run."""
    long = replace(
        piece(0, (2, 0, 1, 3), Phase.PREFILL, 0.0, 2.0), num_prefill_tokens=9000, longest_prompt=9000
    )
    short = replace(piece(1, (2,), Phase.MIXED, 2.0, 2.8), num_prefill_tokens=300, longest_prompt=300)
    steps = [
        piece(2 + i, (0, 1), Phase.DECODE, time, time + 0.019)
        for i, time in enumerate(np.arange(2.0, 3.0, 0.02).tolist())
    ]
    return ClusterHistory((long, *steps, short), (), CAPACITY)


def queued() -> ClusterHistory:
    """Return the same, with a long and a short prompt that come while nothing runs them."""
    requests = (RequestSpan("a", 9000, 0.1, 2.0, 2.9, FinishReason.LENGTH), RequestSpan("b", 300, 0.5))
    return replace(elastic(), requests=requests)


def plot_timelines(
    histories: dict[str, ClusterHistory], paths: list[Path], window: tuple[float, float] | None = None
) -> None:
    with house_style():
        write_figure(timelines_figure(histories, window), paths)


def drawn(histories: dict[str, ClusterHistory], folder: Path) -> str:
    path = folder / "timeline.svg"
    plot_timelines(histories, [path])
    return path.read_text()


def colors_in(path: Path) -> set[str]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    return {f"#{pixel:06X}" for pixel in np.unique(pixels)}


def test_work_has_the_same_colors_in_every_run(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot_timelines({"esp": elastic()}, [path])
    assert {work.value for work in Work} <= colors_in(path)


def served() -> ClusterHistory:
    """Decodes on one instance whose KV is on two others, of which one prefills."""
    prefill = replace(piece(0, (0,), Phase.PREFILL, 0.0, 3.0), num_prefill_tokens=9000, longest_prompt=9000)
    lease = replace(piece(1, (2,), Phase.DECODE, 1.0, 2.0), holder_ids=(0, 1))
    return ClusterHistory((prefill, piece(2, (1,), Phase.DECODE, 0.0, 0.5), lease), (), CAPACITY)


def test_an_instance_that_serves_others_is_marked_as_long_as_it_does(tmp_path: Path) -> None:
    history = served()
    scale = Scale.of([history], None)
    columns = range(NUM_COLUMNS // 3, 2 * NUM_COLUMNS // 3 + 1)
    assert served_stretches(history, scale) == {0: [columns], 1: [columns]}
    path = tmp_path / "timeline.png"
    plot_timelines({"esp": history}, [path])
    assert PINK in colors_in(path)
    words = "serves KV to a batch that runs elsewhere"
    assert words in drawn({"esp": history}, tmp_path)
    assert words not in drawn({"esp": elastic()}, tmp_path)


def test_changes_of_instances_are_marked_and_named(tmp_path: Path) -> None:
    changes = (InstanceChange(1, ChangeKind.LOST, 1.0, "killed"), InstanceChange(9, ChangeKind.JOINED, 1.5))
    text = drawn({"esp": replace(elastic(), changes=changes)}, tmp_path)
    assert "an instance is lost" in text
    assert "an instance joins" in text
    assert "an instance is lost" not in drawn({"esp": elastic()}, tmp_path)


def test_an_instance_that_is_lost_or_has_left_holds_nothing() -> None:
    changes = tuple(
        InstanceChange(i, kind, 5.0)
        for i, kind in enumerate((ChangeKind.LOST, ChangeKind.LEFT, ChangeKind.DRAINING))
    )
    history = replace(elastic(), changes=changes)
    assert [kv_shares(history, i)[-1][1] > 0 for i in range(3)] == [False, False, True]


def test_an_instance_serves_batches_that_meet_as_if_they_were_one() -> None:
    parts = [(0.0, 1.0), (0.9, 2.0), (5.0, 6.0)]
    leases = [replace(piece(n, (2,), Phase.DECODE, *times), holder_ids=(0,)) for n, times in enumerate(parts)]
    history = ClusterHistory(tuple(leases), (), CAPACITY)
    found = served_stretches(history, Scale(0.0, 12.0, 0, 0.0))
    assert found == {0: [range(201), range(500, 601)]}


def test_the_picture_says_all_that_one_needs_to_read_it(tmp_path: Path) -> None:
    text = drawn({"esp": elastic(), "static-sp": elastic()}, tmp_path)
    for words in (
        "esp",
        "static-sp",
        "instance",
        "time since the first request (s)",
        "DoP 4: prompt of 9,000 tokens",
        "DoP 2: decode",
        "DoP 1: prompt of 300 tokens + decode",
        "prefill of long prompts (2,250 tokens or more)",
        "prefill of shorter prompts",
        "KV held (full height: 50 % of an instance",
        "degree of parallelism (DoP)",
    ):
        assert words in text


def colors_of(artist: Any) -> set[RGBA]:
    """Return the fill colors of filled artists, and the colors of lines."""
    filled = isinstance(artist, Patch)
    found = artist.get_facecolor() if filled else artist.get_color()
    return {to_rgba(color) for color in (found if np.ndim(found) == 2 else [found])}


def test_every_color_drawn_is_in_the_legend_and_the_other_way_round() -> None:
    with house_style():
        figure = timelines_figure({"esp": queued(), "static-sp": elastic()})
    artists = [artist for panel in figure.axes for artist in (*panel.patches, *panel.collections)]
    drawn = set[RGBA]().union(*map(colors_of, artists))
    named = set[RGBA]().union(*map(colors_of, figure.legends[0].legend_handles))
    assert named <= drawn
    assert {color[:3] for color in drawn} == {color[:3] for color in named}


def test_a_run_whose_requests_are_known_has_a_strip_of_those_that_wait(tmp_path: Path) -> None:
    assert "waiting" not in drawn({"esp": elastic()}, tmp_path)
    text = drawn({"esp": queued()}, tmp_path)
    for words in ("waiting", "a long prompt arrives", "a shorter prompt waits, or its answer"):
        assert words in text


def test_each_policy_adds_a_panel_of_the_same_width(tmp_path: Path) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot_timelines({"esp": elastic()}, [one])
    plot_timelines({"esp": elastic(), "static-sp": elastic()}, [two])
    assert imread(two).shape[1] == imread(one).shape[1]
    assert imread(two).shape[0] > 1.5 * imread(one).shape[0]


def test_the_labels_of_steps_too_short_for_words_are_left_out(tmp_path: Path) -> None:
    batches = (piece(0, (0,), Phase.PREFILL, 1.0, 1.01), piece(1, (1, 2), Phase.DECODE, 0.0, 4.0))
    text = drawn({"esp": ClusterHistory(batches)}, tmp_path)
    assert "DoP 2: decode" in text
    assert "DoP 1" not in text


def test_no_label_is_cut_by_a_gap_or_covers_another() -> None:
    """Blocks of one group with gaps of a two-hundredth of the picture, and others just as wide as a label."""
    starts = np.arange(0.0, 10.0, 0.5).tolist()
    batches = [piece(n, (0, 1), Phase.DECODE, start, start + 0.45) for n, start in enumerate(starts)]
    batches += [
        piece(100 + n, (2,), (Phase.PREFILL, Phase.DECODE)[n % 2], n * 0.31, (n + 1) * 0.31)
        for n in range(32)
    ]
    with house_style():
        figure = timelines_figure({"esp": ClusterHistory(tuple(batches), (), CAPACITY)})
        figure.draw_without_rendering()
    (panel,) = figure.axes
    labels = [text for text in panel.texts if text.get_text()]
    assert len(labels) >= 20
    boxes = [text.get_window_extent() for text in labels]
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])
    busy = [(panel.transData.transform((b.started_at, 0))[0], b) for b in batches]
    for text, box in zip(labels, boxes, strict=True):
        own = [batch for left, batch in busy if left <= (box.x0 + box.x1) / 2]
        row = round(text.get_position()[1])
        block = max((b for b in own if min(b.group.instance_ids) == row), key=lambda b: b.started_at)
        left, right = (panel.transData.transform((t, 0))[0] for t in (block.started_at, block.ended_at))
        assert left <= box.x0
        assert box.x1 <= right


def test_a_window_shows_its_seconds_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    plot_timelines({"esp": elastic()}, [path], window=(2.05, 2.95))
    assert "DoP 2: decode" in path.read_text()
    assert "DoP 4" not in path.read_text()


def test_a_long_run_is_no_larger_a_picture_than_a_busy_one(tmp_path: Path) -> None:
    busy = [
        piece(i, (i % 4,), (Phase.PREFILL, Phase.DECODE)[i % 2], i / 1e3, (i + 1) / 1e3)
        for i in range(20_000)
    ]
    assert len(drawn({"esp": ClusterHistory(tuple(busy), (), CAPACITY)}, tmp_path)) < 2_000_000


def test_a_column_shows_what_took_most_of_it() -> None:
    scale = Scale(0.0, 1200.0, 0, 0.0)  # a column is a second
    history = ClusterHistory(
        (piece(0, (0,), Phase.DECODE, 0.0, 0.7), piece(1, (0,), Phase.PREFILL, 0.7, 2.1))
    )
    row = rows_of(history, scale)[0]
    assert [(column, row[column].work) for column in sorted(row)] == [
        (0, Work.DECODE),
        (1, Work.SHORT),
        (2, Work.SHORT),
    ]


def test_long_prompts_are_at_least_a_quarter_of_the_longest() -> None:
    batches = [replace(piece(i, (0,), Phase.PREFILL, 0.0, 1.0), longest_prompt=i) for i in (400, 99, 402)]
    assert long_prompt_of(batches) == 101
    assert long_prompt_of([]) == 0


@pytest.mark.parametrize("history", [ClusterHistory(), ClusterHistory((), (), CAPACITY)])
def test_a_run_of_nothing_is_still_a_picture(tmp_path: Path, history: ClusterHistory) -> None:
    assert "no batch ran" in drawn({"esp": history}, tmp_path)


def test_the_same_run_is_the_same_bytes(tmp_path: Path) -> None:
    assert drawn({"esp": elastic()}, tmp_path) == drawn({"esp": elastic()}, tmp_path)


def test_the_strip_of_kv_is_of_the_window_alone() -> None:
    late = piece(1, (0,), Phase.DECODE, 8.0, 9.0)
    history = ClusterHistory((piece(0, (0,), Phase.DECODE, 0.0, 1.0), late), (), {0: 1000})
    before = replace(history, batches=history.batches[:1])
    window = Scale(2.0, 7.0, 0, 1.0)
    assert list(kv_strip(0.0, kv_shares(history, 0), window)) == list(
        kv_strip(0.0, kv_shares(before, 0), window)
    )


def test_many_instances_make_lower_rows_rather_than_a_picture_without_end() -> None:
    batches = tuple(piece(i, (2 * i, 2 * i + 1), Phase.DECODE, 0.0, 1.0) for i in range(64))
    with house_style():
        width, height = timelines_figure({"esp": ClusterHistory(batches)}).get_size_inches()
    assert height < 3 * width
