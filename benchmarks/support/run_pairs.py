"""Runs on workers, each with the same run in virtual time, and of peers: rows, lines and documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from line_picture import Line, Panel

from loong.core.cluster_history import ClusterHistory
from loong.launcher.bench.found import Repeats
from loong.runs.background_load import SHARE_OF_OTHERS
from loong.runs.goodput import of_sweep
from loong.runs.run import PolicyRun
from loong.runs.run_document import document_head, goodput_json, write_document
from loong.server.metrics.trace import chrome_trace
from loong.workloads.metrics.metrics import MIN_CLASS_REQUESTS
from loong.workloads.metrics.result import JSON
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.report import table

GOAL = 0.9
SIDES = ("measured", "simulated")
STABILITY = {True: "stable", False: "grows", None: "too few"}
LATENCIES = {"mean_ttft": "TTFT ms", "p99_ttft_of_short": "P99 of short", "mean_tpot": "TPOT ms"}


@dataclass(frozen=True, slots=True)
class RunPair:
    """A policy under a load, measured and simulated, each judged under every rule.

    A peer is only measured: it has one side, and neither a history nor the simulator's inputs.
    """

    sides: tuple[tuple[PolicyRun, ...], ...]
    plan_time: float | None
    noise: float | None
    history: ClusterHistory | None
    share_of_others: float | None  # of this machine's processors, while it was measured

    @property
    def policy(self) -> str:
        """Return the policy of the runs."""
        return self.sides[0][0].policy

    @property
    def rate(self) -> float:
        """Return the requests a second."""
        return self.sides[0][0].rate

    @property
    def seed(self) -> int:
        """Return the seed of the requests."""
        return self.sides[0][0].asked.seed

    @property
    def trace_name(self) -> str:
        """Return the name of the trace file."""
        return f"trace-{self.policy}-{self.rate:g}-{self.seed}.json"

    def reported(self) -> str:
        """Return a line, to be printed as soon as it is over."""
        shares = ", ".join(
            f"{runs[0].asked.rule.name} {' and simulated '.join(f'{_attainment(run):.1f} %' for run in runs)}"
            for runs in zip(*self.sides, strict=True)
        )
        return f"{self.policy} at {self.rate:g} req/s, seed {self.seed}: {shares}"

    def as_json(self) -> dict[str, JSON]:
        """Return the results of both sides; times in seconds."""
        sides = [_as_json(runs) for runs in self.sides]
        return {
            "policy": self.policy,
            "rate": self.rate,
            "seed": self.seed,
            "num_requests": self.sides[0][0].metrics.num_sent,
            "plan_time": self.plan_time,
            "noise": self.noise,
            SHARE_OF_OTHERS: self.share_of_others,
            "real": sides[0],
            "simulated": sides[1] if len(sides) > 1 else None,
        }


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of one workload."""

    title: str
    rules: Sequence[SLORule]
    pairs: list[RunPair]

    def table(self) -> str:
        """Return a table with a row a pair: measured and simulated side by side."""
        shares = [f"{rule.name} %" for rule in self.rules]
        names = [*shares, *LATENCIES.values(), "all done s", "not ended"]
        header = ("policy", "req/s", "seed", *(word for name in names for word in (name, "sim.")))
        return table(header, [_row(pair) for pair in self.pairs])

    def class_table(self) -> str:
        """Return a table of attainment by length class, measured and (simulated), a row a pair and rule."""
        buckets = self.pairs[0].sides[0][0].metrics.buckets
        header = ("policy", "req/s", "seed", "rule", *(f"{bucket.name}: %" for bucket in buckets), "backlog")
        rows = [
            (pair.policy, f"{pair.rate:g}", f"{pair.seed}", runs[0].asked.rule.name, *_class_cells(runs))
            for pair in self.pairs
            for runs in zip(*pair.sides, strict=True)
        ]
        return table(header, rows)

    def panel(self, rule_index: int) -> Panel:
        """Plot attainment over rate, measured and simulated; the means of the seeds."""
        lines = {}
        for policy in self._policies:
            for side, name in enumerate((policy, f"{policy}, simulated")):
                if line := self._line(policy, rule_index, side):
                    lines[name] = [(rate, 100 * share) for rate, share in line]
        title = f"{self.title}: {self.rules[rule_index].name}"
        return Panel(title, "requests per second", "of all requests (%)", lines, 100 * GOAL, is_share=True)

    def goodputs(self, rule_index: int) -> Iterator[tuple[str, float | None, float | None]]:
        """Yield where each policy's lines cross the goal, measured and simulated, None if they do not."""
        for policy in self._policies:
            measured, simulated = (crossing(self._line(policy, rule_index, side)) for side in (0, 1))
            yield policy, measured, simulated

    def class_goodputs(self, rule_index: int) -> Iterator[tuple[str, float | None, float | None]]:
        """Yield all-class goodput of each policy, measured and simulated.

        None where a run has no class of enough requests, or was not simulated.
        """
        for policy in self._policies:
            attempts = [self._attempts(policy, rule_index, side) for side in (0, 1)]
            measured, simulated = (_swept_rate(policy, self.rules[rule_index], a) for a in attempts)
            yield policy, measured, simulated

    def shares_of_others(self) -> dict[str, list[float | None]]:
        """Return the shares of others in the machine's processors, by policy."""
        return {
            policy: [pair.share_of_others for pair in self.pairs if pair.policy == policy]
            for policy in self._policies
        }

    def write(self, folder: Path, command: str, configuration: dict[str, JSON]) -> None:
        """Write a document of each side, and the trace of the last measured pair."""
        for side, (kind, name) in enumerate(zip(("bench", "simulate"), SIDES, strict=True)):
            path = folder / name
            path.mkdir(parents=True, exist_ok=True)
            head = document_head(kind, command, configuration, self.rules, GOAL)
            runs: list[dict[str, JSON]] = []
            for pair in self.pairs:
                if side >= len(pair.sides):
                    continue
                more: dict[str, JSON] = {}
                if side == 0:
                    trace = None if pair.history is None else pair.trace_name
                    more = {"trace": trace, SHARE_OF_OTHERS: pair.share_of_others}
                runs += [{**run.as_json(), "trace": None, **more} for run in pair.sides[side]]
            write_document(path, {**head, "goodput": self._swept(side)}, runs)
        last = self.pairs[-1]
        if last.history is not None:
            (folder / SIDES[0] / last.trace_name).write_bytes(chrome_trace(last.history))

    @property
    def _policies(self) -> list[str]:
        return list(dict.fromkeys(pair.policy for pair in self.pairs))

    def _at(self, policy: str) -> dict[float, list[RunPair]]:
        """Return pairs by rate."""
        found: dict[float, list[RunPair]] = {}
        for pair in sorted(self.pairs, key=lambda pair: pair.rate):
            if pair.policy == policy:
                found.setdefault(pair.rate, []).append(pair)
        return found

    def _line(self, policy: str, rule_index: int, side: int) -> Line:
        return [
            (rate, fmean(pair.sides[side][rule_index].metrics.attainment or 0.0 for pair in pairs))
            for rate, pairs in self._at(policy).items()
            if all(side < len(pair.sides) for pair in pairs)
        ]

    def _attempts(self, policy: str, rule_index: int, side: int) -> list[Repeats]:
        return [
            Repeats(rate, tuple(pair.sides[side][rule_index] for pair in pairs))
            for rate, pairs in self._at(policy).items()
            if all(side < len(pair.sides) for pair in pairs)
        ]

    def _swept(self, side: int) -> JSON:
        if len({pair.rate for pair in self.pairs}) < 2:
            return []
        sweeps = []
        for policy in self._policies:
            for index, rule in enumerate(self.rules):
                if attempts := self._attempts(policy, index, side):
                    sweeps.append(of_sweep(policy, rule, attempts))
        return goodput_json(sweeps, is_per_class=True)


def crossing(line: Line, goal: float = GOAL) -> float | None:
    """Return the rate up to which a falling line is at the goal, between points on a straight line."""
    for (low, before), (high, after) in pairwise(line):
        if before >= goal > after:
            return low + (high - low) * (before - goal) / (before - after)
    return None


def _swept_rate(policy: str, rule: SLORule, attempts: Sequence[Repeats]) -> float | None:
    runs = [run for attempt in attempts for run in attempt.runs]
    largest = [max(bucket.num_sent for bucket in run.metrics.buckets) for run in runs]
    if min(largest, default=0) < MIN_CLASS_REQUESTS:
        return None
    return of_sweep(policy, rule, attempts).rate


def _row(pair: RunPair) -> tuple[str, ...]:
    cells = [_cells_of(runs) for runs in pair.sides]
    missing = [["-"] * len(cells[0])] * (2 - len(cells))
    side_by_side = zip(*cells, *missing, strict=True)
    return (pair.policy, f"{pair.rate:g}", f"{pair.seed}", *(cell for both in side_by_side for cell in both))


def _cells_of(runs: Sequence[PolicyRun]) -> list[str]:
    first, latencies = runs[0], _latencies(runs[0])
    return [
        *(f"{_attainment(run):.1f}" for run in runs),
        *(_milliseconds(latencies[name]) for name in LATENCIES),
        f"{first.metrics.duration:.1f}",
        str(first.metrics.num_failed),
    ]


def _class_cells(runs: Sequence[PolicyRun]) -> Iterator[str]:
    for buckets in zip(*(run.metrics.buckets for run in runs), strict=True):
        shares = [f"{100 * (bucket.attainment or 0.0):.0f}" for bucket in buckets]
        yield f"{_with_simulated(shares)} of {buckets[0].num_sent}" if buckets[0].num_sent else "-"
    yield _with_simulated([STABILITY[run.is_stable] for run in runs])


def _with_simulated(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{words[0]} ({words[1]})"


def _as_json(runs: Sequence[PolicyRun]) -> dict[str, JSON]:
    first = runs[0]
    return {
        "attainment": {run.asked.rule.name: run.metrics.attainment for run in runs},
        "by_prompt_length": {
            run.asked.rule.name: {b.name: [b.num_sent, b.attainment] for b in run.metrics.buckets}
            for run in runs
        },
        "attains": {run.asked.rule.name: run.attains for run in runs},
        "is_stable": first.is_stable,
        "capacity_share": None if first.used is None else first.used.share,
        "all_done": first.metrics.duration,
        "num_failed": first.metrics.num_failed,
        **_latencies(first),
    }


def _attainment(run: PolicyRun) -> float:
    return 100 * (run.metrics.attainment or 0.0)


def _latencies(run: PolicyRun) -> dict[str, float | None]:
    """Return latencies in seconds.

    Short prompts have under 4k tokens before scaling: they wait for long ones.
    """
    metrics = run.metrics
    ttft, tpot, short = metrics.latencies.ttft, metrics.latencies.tpot, metrics.buckets[0].latencies.ttft
    found = ((ttft, "mean"), (short, "p99"), (tpot, "mean"))
    numbers = (None if latencies is None else latencies[key] for latencies, key in found)
    return dict(zip(LATENCIES, numbers, strict=True))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"
