"""Summarizes runs in sentences: which policy met the SLO most often, its gains and its losses."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import inf

from loong.observability.decision_log.story.phrases import listed
from loong.workloads.plots.curves import at_rate
from loong.workloads.report.run_document import RuleRuns, RunRow, as_number, spread_of

NOTABLE = 0.02  # relative; smaller differences are neither gains nor losses
TIMES = {
    "mean_ttft_ms": "mean TTFT",
    "median_ttft_ms": "median TTFT",
    "p99_ttft_ms": "P99 TTFT",
    "mean_tpot_ms": "mean TPOT",
    "median_tpot_ms": "median TPOT",
    "p99_tpot_ms": "P99 TPOT",
    "mean_e2el_ms": "mean end-to-end latency",
    "p99_e2el_ms": "P99 end-to-end latency",
}
HIGH_IS_GOOD = {
    "slo_attainment": "SLO attainment",
    "request_throughput": "requests completed per second",
    "output_throughput": "output tokens per second",
}
HEADLINES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
BUCKET_TIMES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")


@dataclass(frozen=True, slots=True)
class AttainmentDifference:
    """A number of the winner and the best of the other policies, as text and as a ratio."""

    what: str
    own: str
    other: str
    policy: str
    ratio: float  # own over other's; for numbers that should be high, other's over own

    def __str__(self) -> str:
        return f"{self.what}: {self.own} against {self.other} of {self.policy}"


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Sentences on the best policy, and every loss of it, the worst first.

    `noise` says how far repetitions differ, and where ranges overlap; it is empty without repetitions. Where
    the ranges of two policies overlap, their difference is neither gain nor loss. `interrupted` says which
    numbers are of a part of the requests.
    """

    winner: str
    met: str
    gain: str
    loss: str
    noise: str
    interrupted: str
    losses: tuple[AttainmentDifference, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return all that there are, in reading order."""
        return tuple(filter(None, (self.met, self.interrupted, self.noise, self.gain, self.loss)))


def answer(runs: RuleRuns) -> ReportAnswer:
    """Return the summary of runs under one rule."""
    ranked = sorted(runs.policies, key=lambda policy: _rank(runs, policy), reverse=True)
    winner, others = ranked[0], ranked[1:]
    losses = tuple(sorted(_losses(runs, winner, others), key=lambda loss: -loss.ratio))
    met = _met_by_rate(runs, ranked) if runs.goodput else _met_at_rate(runs, ranked)
    return ReportAnswer(
        winner,
        met,
        _gain(runs, winner, others),
        _loss(runs, winner, others, losses),
        _noise(runs, ranked),
        " ".join(_interrupted(runs)),
        losses,
    )


def share(value: float | None) -> str:
    """Format a share in percent."""
    return "n/a" if value is None else f"{value * 100:.3g} %"


def milliseconds(value: float | None) -> str:
    """Format a time with three significant digits, in seconds from one second on."""
    if value is None:
        return "n/a"
    if value >= 1e3:
        return f"{value / 1e3:,.3g} s" if value < 1e6 else f"{value / 1e3:,.0f} s"
    return f"{value:.3g} ms"


def attainment(runs: RuleRuns, policy: str, rate: float) -> float | None:
    """Return the median of the repetitions; None if none was completed."""
    spread = runs.spread(policy, rate, "slo_attainment")
    return None if spread is None else spread[0]


def _rank(runs: RuleRuns, policy: str) -> tuple[float, float, float]:
    """Return the sort key of a policy: goodput, then attainment, then speed."""
    goodput = max((found.request_rate for found in runs.goodput if found.policy == policy), default=0.0)
    attained = attainment(runs, policy, runs.shown_rate)
    ttft = runs.spread(policy, runs.shown_rate, "mean_ttft_ms")
    return goodput, -1.0 if attained is None else attained, -inf if ttft is None else -ttft[0]


def _met_at_rate(runs: RuleRuns, ranked: Sequence[str]) -> str:
    first, *rest = (f"{policy} met the SLO for {_share_with_range(runs, policy)}" for policy in ranked)
    rest = [words.replace(" met the SLO", "") for words in rest]
    return f"{_start(at_rate(runs.shown_rate))}, {', '.join((f'{first} of {_sent(runs)}', *rest))}."


def _sent(runs: RuleRuns) -> str:
    """Return how many requests each repetition sent at the rate that is shown, in words."""
    repeats = [shown for policy in runs.policies if (shown := runs.at(policy, runs.shown_rate))]
    sent = [run.num_prompts for run in list(chain.from_iterable(repeats)) or runs.runs]
    words = f"{_from_to(sent)} requests"
    counts = [len(shown) for shown in repeats]
    return f"{words} in each of {_from_to(counts)} repetitions" if max(counts, default=0) > 1 else words


def _interrupted(runs: RuleRuns) -> Iterator[str]:
    """Yield a sentence on each run that was interrupted."""
    for run in runs.runs:
        if run.num_unfinished:
            asked = run.num_prompts + run.num_unfinished
            yield (
                f"{run.policy} was interrupted {at_rate(run.request_rate)}: its numbers are of "
                f"{run.num_prompts:,} of {asked:,} requests."
            )


def _from_to(numbers: Collection[int]) -> str:
    """Return the least and the greatest number, or the only one, in words."""
    least, greatest = min(numbers), max(numbers)
    return f"{least:,}" if least == greatest else f"{least:,} to {greatest:,}"


def _share_with_range(runs: RuleRuns, policy: str) -> str:
    """Return the median attainment of a policy and, of several repetitions, the least and the greatest."""
    spread = runs.spread(policy, runs.shown_rate, "slo_attainment")
    if spread is None or not _is_repeated(runs, policy):
        return share(spread and spread[0])
    middle, least, greatest = (f"{value * 100:.3g}" for value in spread)
    return f"{middle} % ({least} to {greatest})"


def _noise(runs: RuleRuns, ranked: Sequence[str]) -> str:
    """Return how far repetitions of one policy differ at the rate that is shown, and where ranges overlap."""
    spreads = [
        spread
        for policy in ranked
        if _is_repeated(runs, policy)
        and (spread := runs.spread(policy, runs.shown_rate, "slo_attainment")) is not None
    ]
    if not spreads:
        return ""
    points = max(greatest - least for _, least, greatest in spreads) * 100
    differ = f"Repetitions of one policy differ by up to {points:.1f} points of SLO attainment"
    if len(spreads) == 1:
        return f"{differ}."
    overlaps = [
        f"between {one} and {other}"
        for one, other in combinations(ranked, 2)
        if _is_noise(runs, (one, other), "slo_attainment", None)
    ]
    if not overlaps:
        return f"{differ}; no ranges overlap."
    noise = "this difference is" if len(overlaps) == 1 else "these differences are"
    return f"{differ}. Ranges overlap {listed(overlaps)}: {noise} noise."


def _met_by_rate(runs: RuleRuns, ranked: Sequence[str]) -> str:
    found = {row.policy: row for row in runs.goodput}
    words = []
    for policy in ranked:
        row = found.get(policy)
        if row is None:
            words.append(f"{policy} at an unknown rate")
        elif row.request_rate == 0:
            words.append(f"{policy} at no rate that was run")
        elif row.too_high_rate is None:
            words.append(
                f"{policy} up to at least {row.request_rate:.3g} req/s, the highest rate that was run"
            )
        else:
            words.append(f"{policy} up to {row.request_rate:.3g} req/s")
    whom = runs.judged_requests.rstrip(",")
    return f"For {share(runs.goal)} of {whom}, the SLO was met by {'; '.join(words)}."


def _gain(runs: RuleRuns, winner: str, others: Sequence[str]) -> str:
    if not others:
        return ""
    rival = others[0]
    rates = {row.policy: row.request_rate for row in runs.goodput}
    if rates.get(winner) and rates.get(rival):
        times = f"{rates[winner] / rates[rival]:.3g} times" if rates[winner] != rates[rival] else "also"
        return f"That is {times} the rate of the best other policy, {rival}."
    gains = [
        difference
        for key in HEADLINES
        if (difference := _difference(runs, winner, [rival], key)) and difference.ratio < 1 - NOTABLE
    ]
    best = sorted(gains, key=lambda gain: gain.ratio)[:2]
    reported = " and ".join(
        f"the {gain.what} of {winner} is {share(1 - gain.ratio)} lower ({gain.own}, not {gain.other})"
        for gain in best
    )
    if rates.get(winner):
        middle = attainment(runs, rival, runs.shown_rate)
        reported = f"{rival} met the SLO for {share(middle)}" + (f", and {reported}" if reported else "")
        return f"{_start(at_rate(runs.shown_rate))}, where {winner} still reached the goal, {reported}."
    if not reported:
        return (
            f"Against {rival}, the best other policy, {winner} gains in neither TTFT nor TPOT (mean and P99)"
            f"{_beyond_noise(runs, winner)}."
        )
    return f"Against {rival}, the best other policy, {reported}."


def _loss(runs: RuleRuns, winner: str, others: Sequence[str], losses: Sequence[AttainmentDifference]) -> str:
    if not others:
        return "Nothing else was run."
    if not any(runs.at(policy, runs.shown_rate) for policy in others):
        return f"No other policy was run to its end {at_rate(runs.shown_rate)}, so no losses are known."
    if not losses:
        return (
            f"In none of the numbers compared is {winner} worse than another policy by over {share(NOTABLE)}"
            f"{_beyond_noise(runs, winner)}."
        )
    more = f"; {len(losses) - 1} more losses are in the report" if len(losses) > 2 else ""
    more = "; one more loss is in the report" if len(losses) == 2 else more
    return f"{winner} loses most in {losses[0]}{more}."


def _beyond_noise(runs: RuleRuns, winner: str) -> str:
    return ", beyond the noise of repetitions" if _is_repeated(runs, winner) else ""


def _losses(runs: RuleRuns, winner: str, others: Sequence[str]) -> Iterator[AttainmentDifference]:
    """Yield the numbers in which another policy is better, overall and in each range of prompt lengths."""
    for key in TIMES:
        found = _difference(runs, winner, others, key)
        if found is not None and found.ratio > 1 + NOTABLE:
            yield found
    yield from (lost for key in HIGH_IS_GOOD if (lost := _shortfall(runs, winner, others, key)))
    for bucket in buckets_of(runs):
        for key in BUCKET_TIMES:
            found = _difference(runs, winner, others, key, bucket)
            if found is not None and found.ratio > 1 + NOTABLE:
                yield found
        found = _shortfall(runs, winner, others, "slo_attainment", bucket)
        if found is not None:
            yield found


def buckets_of(runs: RuleRuns) -> list[str]:
    """Return the ranges of prompt lengths that requests were sent in."""
    names = (
        str(bucket["bucket"]) for run in runs.runs for bucket in run.by_prompt_length if bucket.get("sent")
    )
    return list(dict.fromkeys(names))


def value_of(runs: RuleRuns, policy: str, key: str, bucket: str | None = None) -> float | None:
    """Return the median of a policy's repetitions at the rate that is shown, of all prompts or of a range."""
    spread = spread_of(values_of(runs, policy, key, bucket))
    return None if spread is None else spread[0]


def values_of(runs: RuleRuns, policy: str, key: str, bucket: str | None = None) -> list[float | None]:
    """Return the same number of each repetition."""
    return [_of_run(run, key, bucket) for run in runs.at(policy, runs.shown_rate)]


def _of_run(run: RunRow, key: str, bucket: str | None) -> float | None:
    if bucket is None:
        return run.number(key)
    return next((as_number(b.get(key)) for b in run.by_prompt_length if b.get("bucket") == bucket), None)


def _difference(
    runs: RuleRuns, winner: str, others: Sequence[str], key: str, bucket: str | None = None
) -> AttainmentDifference | None:
    """Return a time of the winner and the lowest of the others; None if either is missing or is noise."""
    own = value_of(runs, winner, key, bucket)
    known = {policy: value_of(runs, policy, key, bucket) for policy in others}
    there = {
        policy: value
        for policy, value in known.items()
        if value and not _is_noise(runs, (winner, policy), key, bucket)
    }
    if not own or not there:
        return None
    best = min(there, key=lambda policy: there[policy])
    return AttainmentDifference(
        _reported(runs, TIMES[key], bucket),
        milliseconds(own),
        milliseconds(there[best]),
        best,
        own / there[best],
    )


def _shortfall(
    runs: RuleRuns, winner: str, others: Sequence[str], key: str, bucket: str | None = None
) -> AttainmentDifference | None:
    """Return the number that should be high if it is notably lower than another policy's, else None."""
    own = value_of(runs, winner, key, bucket)
    known = {policy: value_of(runs, policy, key, bucket) for policy in others}
    there = {
        policy: value
        for policy, value in known.items()
        if value is not None and not _is_noise(runs, (winner, policy), key, bucket)
    }
    if own is None or not there:
        return None
    best = max(there, key=lambda policy: there[policy])
    if there[best] <= own * (1 + NOTABLE):
        return None
    write = share if key == "slo_attainment" else "{:,.4g}".format
    what = _reported(runs, HIGH_IS_GOOD[key], bucket)
    return AttainmentDifference(what, write(own), write(there[best]), best, there[best] / own if own else inf)


def _is_noise(runs: RuleRuns, policies: Sequence[str], key: str, bucket: str | None) -> bool:
    """Return whether repetitions of all these policies have values, and their ranges overlap."""
    spreads = [spread_of(values_of(runs, policy, key, bucket)) for policy in policies]
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads) or not all(_is_repeated(runs, policy) for policy in policies):
        return False
    return max(least for _, least, _ in known) <= min(greatest for _, _, greatest in known)


def _is_repeated(runs: RuleRuns, policy: str) -> bool:
    return len(runs.at(policy, runs.shown_rate)) > 1


def _reported(runs: RuleRuns, what: str, bucket: str | None) -> str:
    return what if bucket is None else f"{what} of prompts of {bucket} tokens{runs.before_scaling}"


def _start(words: str) -> str:
    return words[0].upper() + words[1:]
