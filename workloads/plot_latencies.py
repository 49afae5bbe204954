"""Pictures of one rate: how latencies are spread, and TTFT by length of prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loong.workloads.plot_curves import at_rate
from loong.workloads.plot_style import (
    PANEL_INCHES,
    log_scale,
    name_policies,
    new_figure,
    say_nothing_to_show,
    styles_of,
)
from loong.workloads.run_document import RuleRuns, RunRow, as_number, spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DODGE = 0.7  # of the room of a bucket that its policies share


def latency_cdf_figure(runs: RuleRuns) -> "Figure":
    """The share of all sent requests whose TTFT, and TPOT, is at most so much; repetitions are pooled."""
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
    """Median and P99 of TTFT in each range of prompt lengths that was sent; of repetitions the median."""
    figure = new_figure(PANEL_INCHES)
    panel = figure.subplots()
    buckets = _buckets(runs)
    styles = styles_of(runs.policies)
    for index, policy in enumerate(runs.policies):
        repeats = runs.at(policy, runs.shown_rate)
        offset = DODGE * ((index + 0.5) / len(runs.policies) - 0.5)
        points = [
            (place + offset, middle[0], high[0])
            for place, (bucket, _) in enumerate(buckets)
            if (middle := _of_bucket(repeats, bucket, "median_ttft_ms"))
            and (high := _of_bucket(repeats, bucket, "p99_ttft_ms"))
        ]
        xs, middles, highs = zip(*points, strict=True) if points else ((), (), ())
        color = styles[policy].color
        panel.vlines(xs, middles, highs, color=color, linewidth=1.6)
        panel.plot(xs, highs, color=color, linestyle="", marker="_", markersize=9, markeredgewidth=1.6)
        panel.plot(xs, middles, color=color, linestyle="", marker=styles[policy].marker, label=policy)
    panel.set_xticks(range(len(buckets)), [f"{name}\n{sent} sent" for name, sent in buckets])
    panel.set_xlim(-0.5, max(len(buckets), 1) - 0.5)
    panel.grid(visible=False, axis="x")
    log_scale(panel, "y", is_time=True)
    if not buckets:
        say_nothing_to_show(panel, "nothing was sent")
    panel.set_ylabel("TTFT, logarithmic (ms, s)\nmark: median; end of the line: P99")
    panel.set_xlabel(f"prompt length (tokens{runs.before_scaling})")
    panel.set_title(f"TTFT by length of prompt, {at_rate(runs.shown_rate)}")
    name_policies(figure, runs.policies)
    return figure


def _draw_cdf(
    panel: "Axes", policy: str, repeats: Sequence[RunRow], latencies: Sequence[Sequence[float | None]]
) -> None:
    num_sent = sum(run.num_prompts for run in repeats)
    there = sorted(seconds * 1e3 for of_run in latencies for seconds in of_run if seconds)
    if there:
        style = styles_of([policy])[policy]
        shares = [100.0 * (number + 1) / num_sent for number in range(len(there))]
        panel.step(there, shares, where="post", color=style.color, linestyle=style.dashes, label=policy)


def _buckets(runs: RuleRuns) -> list[tuple[str, int]]:
    """The ranges that were sent, with how many requests a run sent of each."""
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
