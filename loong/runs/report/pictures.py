"""The pictures of runs: a name, a caption, and a function that draws it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loong.runs.report.watched import WatchedRun
from loong.workloads.plots.curves import (
    attainment_by_rate_figure,
    attainment_by_scale_figure,
    latency_by_rate_figure,
)
from loong.workloads.plots.goodput import GoodputBar, goodput_figure
from loong.workloads.plots.latencies import latency_cdf_figure, ttft_by_length_figure
from loong.workloads.plots.pareto import pareto_figure
from loong.workloads.plots.style import PICTURE_KINDS, house_style, write_figure
from loong.workloads.plots.timeline import timelines_figure
from loong.workloads.plots.waterfall import waterfall_figure
from loong.workloads.report.informative_window import informative_window
from loong.workloads.report.pareto import DeviceUnit, ParetoCurves, curves_of
from loong.workloads.report.run_document import RuleRuns, RunRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture. `name` is of its files; `words` say what it shows.

    A wide one takes the whole width of a page.
    """

    name: str
    words: str
    draw: Callable[[], "Figure"]
    is_wide: bool = False
    is_main: bool = True  # rather than for those who want to know more

    def paths(self, folder: Path) -> list[Path]:
        """Return its files in a folder."""
        return [folder / f"{self.name}.{kind}" for kind in PICTURE_KINDS]

    def write(self, folder: Path) -> None:
        """Write it in every file format."""
        with house_style():
            write_figure(self.draw(), self.paths(folder))


def pictures_of_runs(
    runs: RuleRuns,
    watched: Mapping[str, WatchedRun],
    window: Window | None,
    suffix: str,
) -> list[Picture]:
    """Return every picture that these runs have data for, the most informative first."""
    pictures = [
        *(_pictures_of_sweep(runs, suffix) if len(runs.rates) > 1 else ()),
        *timeline_pictures(watched, window, suffix),
        *_pictures_of_rate(runs, suffix),
    ]
    return sorted(pictures, key=lambda picture: not picture.is_main)


def timeline_pictures(
    watched: Mapping[str, WatchedRun], window: Window | None, suffix: str = ""
) -> Iterator[Picture]:
    """Return pictures of the most informative seconds, of late requests, and of the whole run."""
    histories = {name: run.history for name, run in watched.items()}
    late = {name: run.late for name, run in watched.items()}
    if not any(history.batches for history in histories.values()):
        return
    window = window or next(filter(None, map(informative_window, histories.values())), None)
    if window is not None:
        start, end = window
        yield Picture(
            f"timeline-window{suffix}",
            f"What each instance worked on from {start:.4g} to {end:.4g} s: a group is as tall as it has "
            "instances",
            lambda: timelines_figure(histories, window),
            is_wide=True,
        )
    if any(late.values()):
        yield Picture(
            f"late-requests{suffix}",
            f"The {max(map(len, late.values()))} requests of each that were late most: when a batch had "
            "them, and what they waited for",
            lambda: waterfall_figure(late),
            is_wide=True,
        )
    yield Picture(
        f"timeline{suffix}",
        "What each instance worked on in the whole run: a group is as tall as it has instances",
        lambda: timelines_figure(histories),
        is_wide=True,
        is_main=window is None,
    )


def _pictures_of_sweep(runs: RuleRuns, suffix: str) -> Iterator[Picture]:
    yield Picture(
        f"attainment-by-rate{suffix}",
        "The share of all requests sent that met the SLO, by requests per second",
        lambda: attainment_by_rate_figure(runs),
    )
    if bars := goodput_bars(runs):
        yield Picture(
            f"goodput{suffix}",
            f"Requests per second at which {runs.goal * 100:g} % of {runs.judged_requests} met the SLO",
            lambda: goodput_figure(
                [(f"{runs.goodput_name}, {runs.rule.name}", bars)],
                f"{runs.goodput_name}: requests per second at which {runs.goal * 100:g} % meet the SLO",
            ),
        )
    curves = curves_of(runs)
    if curves.points:
        yield Picture(f"pareto{suffix}", _words_of_pareto(curves), lambda: pareto_figure(runs))
    yield Picture(
        f"latency-by-rate{suffix}",
        "Median and P99 of the time to the first token (TTFT), and of the time per token after it (TPOT)",
        lambda: latency_by_rate_figure(runs),
        is_wide=True,
        is_main=False,
    )


def _words_of_pareto(curves: ParetoCurves) -> str:
    """Return a caption, which says why throughput is not per device if it is not."""
    words = (
        f"Output tokens per second of a {curves.unit.value} against the speed for a user: lines are "
        "frontiers, and hollow points are dominated"
    )
    if curves.unit is DeviceUnit.SERVER:
        return f"{words}; the devices of some server are unknown (--num-gpus) or of another kind"
    return words


def _pictures_of_rate(runs: RuleRuns, suffix: str) -> Iterator[Picture]:
    shown = [run for run in runs.runs if run.request_rate == runs.shown_rate and not run.is_cut_off]
    if any(run.by_prompt_length for run in shown):
        yield Picture(
            f"ttft-by-length{suffix}",
            "Time to the first token by length of prompt: who waits for whom",
            lambda: ttft_by_length_figure(runs),
        )
    if any(run.slo_ratios for run in shown):
        yield Picture(
            f"attainment-by-scale{suffix}",
            "The share that would have met the SLO had it been stricter or looser",
            lambda: attainment_by_scale_figure(runs),
        )
    if any(run.ttfts for run in shown):
        yield Picture(
            f"latency-cdf{suffix}",
            _words_of_cdf(shown),
            lambda: latency_cdf_figure(runs),
            is_wide=True,
            is_main=False,
        )


def _words_of_cdf(runs: Sequence[RunRow]) -> str:
    """Return a caption, with the reasons why lines of these runs end below 100 % or begin above 0."""
    sentences = ["The share of requests by latency"]
    if any(run.completed < run.num_prompts for run in runs):
        sentences.append("a line of TTFT that ends below 100 % had failures")
    completed = [
        tpot for run in runs for tpot, ttft in zip(run.tpots, run.ttfts, strict=True) if ttft is not None
    ]
    if None in completed:
        sentences.append("answers of one token have no TPOT, so its line ends lower")
    if 0.0 in completed:
        sentences.append("answers that came in one piece have a TPOT of 0, left of all that is drawn")
    return "; ".join(sentences)


def goodput_bars(runs: RuleRuns) -> Sequence[GoodputBar]:
    """Return the goodput of every policy that has one."""
    return [
        GoodputBar(found.policy, found.request_rate, is_at_least=found.too_high_rate is None)
        for found in runs.goodput
    ]
