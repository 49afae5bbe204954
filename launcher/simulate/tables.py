"""What a simulation shows people: attainment by rate and by length, goodput, and what a run did."""

from collections.abc import Sequence

from loong.launcher.simulate.config import SimulateConfig
from loong.launcher.simulate.points import ATTAINMENT, PointResult
from loong.launcher.simulate.search import Goodput
from loong.workloads.counters import ServerCounters
from loong.workloads.report import format_buckets, format_comparison, format_counters, format_run, table
from loong.workloads.slo import SLORule
from loong.workloads.workload import origin_of

NOT_SIMULATED = "-"


def heading(config: SimulateConfig) -> str:
    """What is simulated, and where its times come from."""
    hardware, load = config.hardware, config.load
    count = (
        f"{load.num_requests} requests"
        if load.num_requests
        else f"{load.duration:g} s of requests are measured"
    )
    origin = "times as measured by loong profile"
    if not hardware.measured:
        origin = "times from its roofline, nothing was measured"
    return (
        f"Simulated: {config.model} on {hardware.num_instances} instances of {hardware.tp_size} x "
        f"{hardware.device}; {origin}\n"
        f"Workload: {load.workload} ({origin_of(load.workload)}, scale {load.length_scale:g}), "
        f"{count}, seed {load.seed}\n"
    )


def runs(rule: SLORule, results: Sequence[PointResult]) -> str:
    """A block a policy, and the policies side by side: for one rate."""
    blocks = []
    for result in results:
        blocks.append(format_run(result.point.policy, result.metrics, rule.describe()))
        blocks.append(format_buckets(result.metrics))
        blocks.append(format_counters(counters_of(result)))
    if len(results) > 1:
        blocks.append(format_comparison({result.point.policy: result.metrics for result in results}))
    return "\n\n".join(blocks)


def attainment_by_rate(policies: Sequence[str], results: Sequence[PointResult]) -> str:
    """One row a rate and one column a policy, in percent of all sent."""
    cells = {(r.point.rate, r.point.policy): _attainment(r) for r in results}
    rates = sorted({r.point.rate for r in results})
    rows = [
        (f"{rate:.4g}", *(cells.get((rate, policy), NOT_SIMULATED) for policy in policies)) for rate in rates
    ]
    return table(("req/s: SLO %", *policies), rows)


def attainment_by_length(results: Sequence[PointResult]) -> str:
    """One row a run and one column a range of prompt lengths that was sent, in percent."""
    names = [bucket.name for bucket in results[0].metrics.buckets]
    is_sent = [any(r.metrics.buckets[i].num_sent for r in results) for i in range(len(names))]
    rows = [
        (
            f"{r.point.policy} at {r.point.rate:.4g} req/s",
            _attainment(r),
            *(_percent(b.attainment) for b, sent in zip(r.metrics.buckets, is_sent, strict=True) if sent),
        )
        for r in results
    ]
    columns = (name for name, sent in zip(names, is_sent, strict=True) if sent)
    return table(("by unscaled prompt: SLO %", "all", *columns), rows)


def goodput(goodputs: Sequence[Goodput]) -> str:
    """One row a policy: the highest rate that attains, also relative to the best, if the best was found."""
    best = max(goodputs, key=lambda g: g.rate)
    is_known = best.best is not None and all(g.too_high_rate is not None for g in goodputs)
    rows = [
        (
            g.policy,
            _goodput_rate(g),
            f"{g.rate / best.rate:.2f}" if is_known else NOT_SIMULATED,
            str(len(g.points)),
        )
        for g in goodputs
    ]
    return table((f"P{ATTAINMENT * 100:.0f} goodput", "req/s", "of best", "runs"), rows)


def refusals(results: Sequence[PointResult]) -> str:
    """Which policies refused requests that they can never hold; nothing if none did."""
    worst: dict[str, tuple[int, int]] = {}
    for result in results:
        policy, metrics = result.point.policy, result.metrics
        if metrics.num_failed and not result.is_cut_off:
            worst[policy] = max(worst.get(policy, (0, 0)), (metrics.num_failed, metrics.num_sent))
    return "\n".join(
        f"{policy} refused {num_refused} of {num_sent} requests: they need more KV than it gives one request"
        for policy, (num_refused, num_sent) in worst.items()
    )


def counters_of(result: PointResult) -> ServerCounters:
    """What a server would have counted."""
    stats = result.stats
    return ServerCounters(
        dict(sorted(stats.num_batches_by_dop.items())),
        stats.num_scale_ups,
        stats.num_scale_downs,
        stats.num_retained_tokens,
        stats.num_migrated_tokens,
    )


def _goodput_rate(goodput: Goodput) -> str:
    if goodput.too_high_rate is None:
        return f">= {goodput.rate:.4g}"
    return f"< {goodput.too_high_rate:.4g}" if goodput.best is None else f"{goodput.rate:.4g}"


def _attainment(result: PointResult) -> str:
    if result.is_cut_off:
        return f"< {ATTAINMENT * 100:.0f}"
    return _percent(result.metrics.attainment)


def _percent(value: float | None) -> str:
    return NOT_SIMULATED if value is None else f"{value * 100:.1f}"
