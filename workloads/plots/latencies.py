"""Pictures of one rate: distributions of latencies, and TTFT by length of prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loong.workloads.metrics.metrics import BUCKET_EDGES, BUCKET_NAMES
from loong.workloads.plots.curves import at_rate
from loong.workloads.plots.style import (
    PANEL_INCHES,
    PAPER,
    log_scale,
    name_policies,
    new_figure,
    say_nothing_to_show,
    styles_of,
)
from loong.workloads.report.run_document import RuleRuns, RunRow, as_number, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DODGE = 0.7  # of the room of a bucket that its policies share
SCATTER = 0.6  # of a policy's part of that, which its requests have
MIN_FOR_P99 = 100  # requests; of fewer, each is a point
POINT_OPACITY = 0.55


def latency_cdf_figure(runs: RuleRuns) -> "Figure":
    """Draw the share of all sent requests by their TTFT, and by their TPOT; repetitions are pooled."""
    width, height = PANEL_INCHES
    figure = new_figure((2 * width, height))
    ttft, tpot = figure.subplots(1, 2, sharey=True)
    for policy in reversed(runs.policies):
        repeats = runs.at(policy, runs.shown_rate)
        _draw_cdf(ttft, policy, repeats, [run.ttfts for run in repeats])
        _draw_cdf(tpot, policy, repeats, [run.tpots for run in repeats])
    for panel, name in ((ttft, "TTFT"), (tpot, "TPOT")):
        panel.set_title(f"{name}, {at_rate(runs.shown_rate)}")
        panel.set_xlabel(f"{name}, logarithmic (ms, s)")
        log_scale(panel, "x", is_time=True)
        panel.set_ylim(0, 103)
        if not panel.lines:
            say_nothing_to_show(panel, "no request had one")
    ttft.set_ylabel("requests within that time (% of all sent)")
    name_policies(figure, runs.policies, has_markers=False)
    return figure


def ttft_by_length_figure(runs: RuleRuns) -> "Figure":
    """Draw median and P99 of TTFT in each range of prompt lengths that was sent; of repetitions the median.

    Where a range has fewer requests than a P99 needs, each is a point.
    """
    figure = new_figure(PANEL_INCHES)
    panel = figure.subplots()
    buckets = _buckets(runs)
    for index, policy in enumerate(runs.policies):
        offset = DODGE * ((index + 0.5) / len(runs.policies) - 0.5)
        for place, (bucket, num_sent) in enumerate(buckets):
            if num_sent >= MIN_FOR_P99:
                _draw_spread(panel, runs, policy, bucket, place + offset)
            else:
                _draw_points(panel, runs, policy, bucket, place + offset)
    panel.set_xticks(range(len(buckets)), [f"{name}\n{sent} sent" for name, sent in buckets])
    panel.set_xlim(-0.5, max(len(buckets), 1) - 0.5)
    panel.grid(visible=False, axis="x")
    log_scale(panel, "y", is_time=True)
    if not buckets:
        say_nothing_to_show(panel, "nothing was sent")
    panel.set_ylabel(f"TTFT, logarithmic (ms, s)\n{_key(buckets)}")
    panel.set_xlabel(f"prompt length (tokens{runs.before_scaling})")
    panel.set_title(f"TTFT by length of prompt, {at_rate(runs.shown_rate)}")
    name_policies(figure, runs.policies)
    return figure


def _key(buckets: Sequence[tuple[str, int]]) -> str:
    """Return the legend of the marks."""
    marks = ["mark: median"]
    if any(num_sent >= MIN_FOR_P99 for _, num_sent in buckets):
        marks.append("end of the line: P99")
    if any(num_sent < MIN_FOR_P99 for _, num_sent in buckets):
        marks.append("point: one request")
    return "; ".join(marks)


def _draw_spread(panel: "Axes", runs: RuleRuns, policy: str, bucket: str, x: float) -> None:
    repeats, style = runs.at(policy, runs.shown_rate), styles_of(runs.policies)[policy]
    middle, high = (_of_bucket(repeats, bucket, key) for key in ("median_ttft_ms", "p99_ttft_ms"))
    if middle is None or high is None:
        return
    panel.vlines(x, middle[0], high[0], color=style.color, linewidth=1.6)
    panel.plot([x], [high[0]], color=style.color, marker="_", markersize=9, markeredgewidth=1.6)
    panel.plot([x], [middle[0]], color=style.color, marker=style.marker)


def _draw_points(panel: "Axes", runs: RuleRuns, policy: str, bucket: str, x: float) -> None:
    """Draw each request of all repetitions in the order of arrival from left to right, and the median."""
    repeats, style = runs.at(policy, runs.shown_rate), styles_of(runs.policies)[policy]
    times = [ttft * 1e3 for run in repeats for ttft in _ttfts_of(run, bucket, runs.length_scale)]
    width = DODGE / len(runs.policies) * SCATTER
    xs = [x + width * ((number + 0.5) / len(times) - 0.5) for number in range(len(times))]
    panel.plot(xs, times, color=style.color, linestyle="", marker=".", markersize=4, alpha=POINT_OPACITY)
    if (middle := _of_bucket(repeats, bucket, "median_ttft_ms")) is not None:
        panel.plot([x], [middle[0]], color=style.color, marker=style.marker, markeredgecolor=PAPER)


def _ttfts_of(run: RunRow, bucket: str, length_scale: float) -> list[float]:
    """Return the TTFT of requests with prompts in the range; empty if the document has no lengths."""
    if bucket not in BUCKET_NAMES:
        return []
    place = BUCKET_NAMES.index(bucket)
    low, high = (edge * length_scale for edge in BUCKET_EDGES[place : place + 2])
    lengths = zip(run.requested_input_lens, run.ttfts, strict=False)
    return [ttft for length, ttft in lengths if ttft is not None and low <= length < high]


def _draw_cdf(
    panel: "Axes", policy: str, repeats: Sequence[RunRow], latencies: Sequence[Sequence[float | None]]
) -> None:
    num_sent = sum(run.num_prompts for run in repeats)
    known = sorted(seconds * 1e3 for of_run in latencies for seconds in of_run if seconds is not None)
    there = [time for time in known if time > 0]  # 0 has no place on the axis, and counts all the same
    if there:
        style = styles_of([policy])[policy]
        shares = [100.0 * (number + 1) / num_sent for number in range(len(known) - len(there), len(known))]
        panel.step(there, shares, where="post", color=style.color, linestyle=style.dashes, label=policy)


def _buckets(runs: RuleRuns) -> list[tuple[str, int]]:
    """Return the ranges that were sent, with the number of requests that a run sent of each."""
    sent: dict[str, int] = {}
    for run in runs.runs:
        if run.request_rate == runs.shown_rate:
            for bucket in run.by_prompt_length:
                count = int(as_number(bucket.get("sent")) or 0)
                name = str(bucket.get("bucket"))
                sent[name] = max(sent.get(name, 0), count)
    return [(name, count) for name, count in sent.items() if count]


def _of_bucket(repeats: Sequence[RunRow], name: str, key: str) -> tuple[float, float, float] | None:
    return spread_of(
        [
            as_number(bucket.get(key))
            for run in repeats
            for bucket in run.by_prompt_length
            if bucket.get("bucket") == name
        ]
    )
