"""Errors of predicted times, from the decision logs of real runs, by kinds of batches.

For each batch the log has the measured time and the predicted time of one of its steps. The prediction is the
one of its plan, corrected by the batches before it. Errors are predicted over measured seconds, less 1.
Prompts on one instance are "large" above the 2,048 tokens of a captured step. They are "serving" if a batch
elsewhere has KV there at the same time.

    python benchmarks/evaluation/reality.py ... --output-dir out
    python benchmarks/scheduling/prediction_errors.py out/mixed/measured/decisions-*.jsonl
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import fmean, median

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.observability.decision_log.lines import BatchEndedLine, BatchStartedLine, LoggedBatch, PlannedLine
from loong.observability.decision_log.reader import read_log
from loong.worker.steps.mixed_inputs import MAX_ROWS
from loong.workloads.report.report import table


def errors_of(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the kind of each batch that was predicted, and its error."""
    batches: dict[int, LoggedBatch] = {}
    running, serving = set[int](), set[int]()  # serving: those during which an instance of theirs serves
    for line in read_log(path):
        if isinstance(line, PlannedLine):
            batches |= {batch.batch_id: batch for batch in line.batches}
        elif isinstance(line, BatchStartedLine):
            running.add(line.batch_id)
            for one, other in permutations(running, 2):
                if not set(batches[one].instance_ids).isdisjoint(batches[other].holder_ids):
                    serving.add(one)
        elif isinstance(line, BatchEndedLine):
            running.discard(line.batch_id)
            if line.predicted_seconds:
                kind = _kind(batches[line.batch_id], is_serving=line.batch_id in serving)
                yield kind, line.predicted_seconds / line.seconds - 1


def _kind(batch: LoggedBatch, *, is_serving: bool) -> str:
    where = "group" if batch.dop > 1 else "one instance"
    if not batch.chunks:
        return f"{where}, decodes"
    if batch.decodes:
        return f"{where}, prompts and decodes"
    if batch.dop > 1:
        return f"{where}, prompts"
    size = "large" if sum(chunk.num_tokens for chunk in batch.chunks) > MAX_ROWS else "small"
    return f"{where}, prompts, {size}{', serving' if is_serving else ''}"


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return statistics of errors."""
    sizes = sorted(map(abs, errors))
    return {
        "number": len(errors),
        "bias": median(errors),
        "mean": fmean(sizes),
        "median": median(sizes),
        "p95": sizes[int(0.95 * len(sizes))],
    }


def by_kind(errors: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Return a summary of all, of those with prompts, and of each kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for kind, error in errors:
        for name in ("all", *(["with prompts"] if "prompts" in kind else []), kind):
            found[name].append(error)
    return {name: summary(found[name]) for name in sorted(found)}


def error_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of the summaries of each kind."""
    return table(
        ("batches", "number", "bias", "mean size", "median size", "P95"),
        [
            (name, f"{row['number']:.0f}", *(f"{row[k]:.1%}" for k in ("bias", "mean", "median", "p95")))
            for name, row in rows.items()
        ],
    )


def main() -> None:
    parser = script_parser("prediction_errors", __doc__)
    parser.add_argument("logs", type=Path, nargs="+", help="decision logs to read")
    args = parser.parse_args()
    rows = by_kind(error for log in args.logs for error in errors_of(log))
    print(error_table(rows))
    print_result("prediction_errors", {"logs": list(map(str, args.logs)), "errors": rows}, save=args.save)


if __name__ == "__main__":
    main()
