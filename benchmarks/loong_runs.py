"""Runs of `loong bench` and `loong simulate` from scripts, and what their documents say."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loong.launcher.cli import main

Document = dict[str, Any]


def run_loong(command: str, arguments: Sequence[str], folder: Path) -> Document:
    """Run a command of loong that writes a document into a folder, and read that.

    Requests that fail make no difference, nor does being told to stop early: the document tells what there
    is. Exits if there is none.
    """
    words = [command, *arguments, "--output-dir", str(folder)]
    path = folder / "results.json"
    path.unlink(missing_ok=True)
    try:
        with _typed(["loong", *words]):
            main(words)
    except SystemExit as stopped:
        print(f"{command} was stopped: {stopped.code}", file=sys.stderr)
    if not path.exists():
        raise SystemExit(f"loong {command} wrote no {path}")
    document: Document = json.loads(path.read_text())
    return document


@contextmanager
def _typed(words: list[str]) -> Iterator[None]:
    """Let the document tell this command line."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy did at a rate: the median of its repeated runs; None where nothing completed."""

    policy: str
    rate: float
    attainment: float
    runs: tuple[Document, ...]

    def median(self, key: str) -> float | None:
        """The median of a number that the runs have, such as `mean_ttft_ms`."""
        values = [run[key] for run in self.runs if run[key] is not None]
        return median(values) if values else None

    def attainment_at(self, scale: float) -> float:
        """Attainment if every bound of the rule were multiplied."""
        shares: list[float] = [
            sum(ratio is not None and ratio <= scale for ratio in run["slo_ratios"]) / len(run["slo_ratios"])
            for run in self.runs
        ]
        return median(shares)


def points_of(document: Document) -> list[Point]:
    """Every policy at every rate, in the order in which they ran; runs that were cut off are left out."""
    groups: dict[tuple[str, float], list[Document]] = {}
    for run in document["runs"]:
        if not run["is_cut_off"]:
            groups.setdefault((run["policy"], float(run["request_rate"])), []).append(run)
    return [
        Point(policy, rate, median(run["slo_attainment"] for run in runs), tuple(runs))
        for (policy, rate), runs in groups.items()
    ]
