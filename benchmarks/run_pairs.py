"""Runs on workers, each with the same run in virtual time: rows, lines over the rate, and documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from line_picture import Line, Panel

from loong.core.timeline import ClusterHistory
from loong.launcher.bench_found import Repeats
from loong.launcher.goodput import of_sweep
from loong.launcher.other_work import SHARE_OF_OTHERS
from loong.launcher.run_document import document_head, goodput_json, write_document
from loong.launcher.runs import Run
from loong.server.trace import chrome_trace
from loong.workloads.report import table
from loong.workloads.result import JSON
from loong.workloads.slo import SLORule

GOAL = 0.9
SIDES = ("measured", "simulated")
LATENCIES = {"mean_ttft": "TTFT ms", "p99_ttft_of_short": "P99 of short", "mean_tpot": "TPOT ms"}


@dataclass(frozen=True, slots=True)
class RunPair:
    """A policy under a load, measured and simulated, each judged under every rule."""

    sides: tuple[tuple[Run, ...], tuple[Run, ...]]
    plan_time: float
    noise: float
    history: ClusterHistory
    share_of_others: float | None  # of this machine's processors, while it was measured

    @property
    def policy(self) -> str:
        """Whose runs they are."""
        return self.sides[0][0].policy

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.sides[0][0].rate

    @property
    def seed(self) -> int:
        """What the requests were drawn with."""
        return self.sides[0][0].asked.seed

    @property
    def trace_name(self) -> str:
        """Of the file of what ran when."""
        return f"trace-{self.policy}-{self.rate:g}-{self.seed}.json"

    def told(self) -> str:
        """In a line, as soon as it is over."""
        shares = ", ".join(
            f"{runs[0].asked.rule.name} {' and simulated '.join(f'{_attainment(run):.1f} %' for run in runs)}"
            for runs in zip(*self.sides, strict=True)
        )
        return f"{self.policy} at {self.rate:g} req/s, seed {self.seed}: {shares}"

    def as_json(self) -> dict[str, JSON]:
        """What both sides came to; times in seconds."""
        measured, simulated = map(_as_json, self.sides)
        return {
            "policy": self.policy,
            "rate": self.rate,
            "seed": self.seed,
            "num_requests": self.sides[0][0].metrics.num_sent,
            "plan_time": self.plan_time,
            "noise": self.noise,
            SHARE_OF_OTHERS: self.share_of_others,
            "real": measured,
            "simulated": simulated,
        }


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of one workload."""

    title: str
    rules: Sequence[SLORule]
    pairs: list[RunPair]

    def table(self) -> str:
        """A row a pair: measured and, beside it, simulated."""
        shares = [f"{rule.name} %" for rule in self.rules]
        names = [*shares, *LATENCIES.values(), "not ended"]
        header = ("policy", "req/s", "seed", *(word for name in names for word in (name, "sim.")))
        return table(header, [_row(pair) for pair in self.pairs])

    def panel(self, rule_index: int) -> Panel:
        """Attainment over rate, measured and simulated over each other; the means of the seeds."""
        lines = {}
        for policy in self._policies:
            for side, name in enumerate((policy, f"{policy}, simulated")):
                line = self._line(policy, rule_index, side)
                lines[name] = [(rate, 100 * share) for rate, share in line]
        title = f"{self.title}: {self.rules[rule_index].name}"
        return Panel(title, "requests per second", "of all requests (%)", lines, 100 * GOAL, is_share=True)

    def goodputs(self, rule_index: int) -> Iterator[tuple[str, float | None, float | None]]:
        """Of each policy where the lines cross the goal, measured and simulated, None if they do not."""
        for policy in self._policies:
            measured, simulated = (crossing(self._line(policy, rule_index, side)) for side in (0, 1))
            yield policy, measured, simulated

    def shares_of_others(self) -> dict[str, list[float | None]]:
        """Of the machine's processors, by policy."""
        return {
            policy: [pair.share_of_others for pair in self.pairs if pair.policy == policy]
            for policy in self._policies
        }

    def write(self, folder: Path, command: str, configuration: dict[str, JSON]) -> None:
        """Write a document of each side, and the trace of what was measured last."""
        for side, (kind, name) in enumerate(zip(("bench", "simulate"), SIDES, strict=True)):
            path = folder / name
            path.mkdir(parents=True, exist_ok=True)
            head = document_head(kind, command, configuration, self.rules, GOAL)
            runs: list[dict[str, JSON]] = []
            for pair in self.pairs:
                more = {} if side else {"trace": pair.trace_name, SHARE_OF_OTHERS: pair.share_of_others}
                runs += [{**run.as_json(), "trace": None, **more} for run in pair.sides[side]]
            write_document(path, {**head, "goodput": self._swept(side)}, runs)
        last = self.pairs[-1]
        (folder / SIDES[0] / last.trace_name).write_bytes(chrome_trace(last.history))

    @property
    def _policies(self) -> list[str]:
        return list(dict.fromkeys(pair.policy for pair in self.pairs))

    def _at(self, policy: str) -> dict[float, list[RunPair]]:
        """By rate."""
        found: dict[float, list[RunPair]] = {}
        for pair in sorted(self.pairs, key=lambda pair: pair.rate):
            if pair.policy == policy:
                found.setdefault(pair.rate, []).append(pair)
        return found

    def _line(self, policy: str, rule_index: int, side: int) -> Line:
        return [
            (rate, fmean(pair.sides[side][rule_index].metrics.attainment or 0.0 for pair in pairs))
            for rate, pairs in self._at(policy).items()
        ]

    def _swept(self, side: int) -> JSON:
        if len({pair.rate for pair in self.pairs}) < 2:
            return []
        sweeps = []
        for policy in self._policies:
            for index, rule in enumerate(self.rules):
                attempts = [
                    Repeats(rate, tuple(pair.sides[side][index] for pair in pairs))
                    for rate, pairs in self._at(policy).items()
                ]
                sweeps.append(of_sweep(policy, rule, attempts))
        return goodput_json(sweeps)


def crossing(line: Line, goal: float = GOAL) -> float | None:
    """The rate up to which a line that falls is at the goal, between points on a straight line."""
    for (low, before), (high, after) in pairwise(line):
        if before >= goal > after:
            return low + (high - low) * (before - goal) / (before - after)
    return None


def _row(pair: RunPair) -> tuple[str, ...]:
    cells = [pair.policy, f"{pair.rate:g}", f"{pair.seed}"]
    for runs in zip(*pair.sides, strict=True):
        cells += [f"{_attainment(run):.1f}" for run in runs]
    latencies = [_latencies(runs[0]) for runs in pair.sides]
    for name in LATENCIES:
        cells += [_milliseconds(found[name]) for found in latencies]
    return (*cells, *(str(runs[0].metrics.num_failed) for runs in pair.sides))


def _as_json(runs: Sequence[Run]) -> dict[str, JSON]:
    attainment: dict[str, JSON] = {run.asked.rule.name: run.metrics.attainment for run in runs}
    return {"attainment": attainment, "num_failed": runs[0].metrics.num_failed, **_latencies(runs[0])}


def _attainment(run: Run) -> float:
    return 100 * (run.metrics.attainment or 0.0)


def _latencies(run: Run) -> dict[str, float | None]:
    """In seconds; short prompts are of under 4k tokens before scaling: they wait for the long ones."""
    metrics = run.metrics
    ttft, tpot, short = metrics.latencies.ttft, metrics.latencies.tpot, metrics.buckets[0].latencies.ttft
    found = ((ttft, "mean"), (short, "p99"), (tpot, "mean"))
    numbers = (None if latencies is None else latencies[key] for latencies, key in found)
    return dict(zip(LATENCIES, numbers, strict=True))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.4g}"
