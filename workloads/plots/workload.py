"""The picture of a workload: histograms of its lengths and gaps."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loong.workloads.palette import BLUE, GREEN, ORANGE
from loong.workloads.plots.style import house_style, log_scale, new_figure, write_figure
from loong.workloads.request import WorkloadRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (4.5, 3.2)
NUM_BINS = 40
COLORS = (BLUE, GREEN, ORANGE)


def plot_workload(title: str, requests: Sequence[WorkloadRequest], path: Path) -> None:
    """Draw histograms of input lengths, output lengths and gaps, and write them to `path`.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or its ending names no kind of picture.
    """
    panels: dict[str, Sequence[float]] = {
        "input tokens": [request.num_prompt_tokens for request in requests],
        "output tokens": [request.num_output_tokens for request in requests],
        "seconds between arrivals": [b.arrival_time - a.arrival_time for a, b in pairwise(requests)],
    }
    width, height = PANEL_INCHES
    with house_style():
        figure = new_figure((width * len(panels), height))
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, color, (label, samples) in zip(axes, COLORS, panels.items(), strict=True):
            _draw(panel, label, samples, color)
        axes[0].set_ylabel("requests")
        figure.suptitle(title)
        write_figure(figure, [path])


def _draw(panel: "Axes", label: str, samples: Sequence[float], color: str) -> None:
    """Draw a histogram on a logarithmic axis with bins of equal width; values of 0 or less are left out."""
    panel.set_xlabel(label)
    above = np.array([sample for sample in samples if sample > 0])
    if not above.size:
        panel.text(0.5, 0.5, "none above 0", ha="center", va="center", transform=panel.transAxes)
        return
    low, high = above.min() / 1.05, above.max() * 1.05
    panel.hist(above, bins=np.geomspace(low, high, NUM_BINS).tolist(), color=color)
    log_scale(panel, "x")
