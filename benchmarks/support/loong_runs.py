"""Runs of `loong bench` and `loong simulate` from scripts, and their documents."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loong.launcher.cli import main
from loong.workloads.metrics.record import CUT_OFF

REFUSED = "HTTP 4"  # how the error of a request begins that the server would not take

Document = dict[str, Any]


def run_loong(command: str, arguments: Sequence[str], folder: Path) -> Document:
    """Run a command of loong that writes a document into a folder, and read that.

    Failed requests make no difference, nor does an early stop: the document has the runs that were made, and
    `end` reports the missing ones. Exits if there is none.
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
    """Let the document record this command line."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def shared_arguments(args: argparse.Namespace, workload: str) -> list[str]:
    """Return the flags that are the same for servers and in virtual time, except the rate."""
    given = [
        ("--policy", args.policy),
        ("--num-instances", args.num_instances),
        ("--workload", workload),
        ("--length-scale", args.length_scale),
        ("--seed", args.seed),
        ("--slo", args.slo),
    ]
    if args.num_requests is None:
        given.append(("--duration", args.duration))
    else:
        given.append(("--num-requests", args.num_requests))
    if args.model is not None:
        given.append(("--model", args.model))
    return [str(word) for pair in given for word in pair]


def server_arguments(args: argparse.Namespace, more: Sequence[str] = ()) -> list[str]:
    """Return the additional flags for servers, with random weights for a model.

    `more` is for `loong serve`.
    """
    words = ["--device", args.device, "--repeat", str(args.repeat)]
    if args.model is not None:
        words += ["--load-format", "dummy"]
    return [*words, f"--extra-server-args={' '.join([args.extra_server_args, *more])}"]


def troubles(document: Document) -> list[str]:
    """Return what kept servers from being measured.

    That is policies without a run, and requests that neither ended nor were refused.
    """
    if document["kind"] != "bench":
        return []
    measured = {run["policy"] for run in document["runs"]}
    reported = [
        f"{name} was not measured" for name in document["configuration"]["policies"] if name not in measured
    ]
    for run in document["runs"]:
        errors = [e for e in run["errors"] if e and e != CUT_OFF and not e.startswith(REFUSED)]
        if errors:
            where = f"{run['policy']} at {run['request_rate']} req/s"
            reported.append(f"{where}: {len(errors)} of {len(run['errors'])} requests failed: {errors[0]}")
    return reported


def end(documents: Sequence[Document]) -> None:
    """Print what could not be measured, and exit with 1 if there is anything."""
    if reported := [line for document in documents for line in troubles(document)]:
        raise SystemExit("\n".join(reported))


@dataclass(frozen=True, slots=True)
class Point:
    """The result of a policy at a rate: the median of its repeated runs; None where nothing completed."""

    policy: str
    rate: float
    attainment: float
    runs: tuple[Document, ...]

    def median(self, key: str) -> float | None:
        """Return the median of a number of the runs, such as `mean_ttft_ms`."""
        values = [run[key] for run in self.runs if run[key] is not None]
        return median(values) if values else None

    def attainment_at(self, scale: float) -> float:
        """Return the attainment if every bound of the rule were multiplied."""
        shares: list[float] = [
            sum(ratio is not None and ratio <= scale for ratio in run["slo_ratios"]) / len(run["slo_ratios"])
            for run in self.runs
        ]
        return median(shares)


def points_of(document: Document) -> list[Point]:
    """Return every policy at every rate, in the order of the runs, without runs that were cut off."""
    groups: dict[tuple[str, float], list[Document]] = {}
    for run in document["runs"]:
        if not run["is_cut_off"]:
            groups.setdefault((run["policy"], float(run["request_rate"])), []).append(run)
    return [
        Point(policy, rate, median(run["slo_attainment"] for run in runs), tuple(runs))
        for (policy, rate), runs in groups.items()
    ]
