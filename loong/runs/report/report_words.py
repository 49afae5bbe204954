"""The last lines of a measuring command: the report's sentences, its path, and JSON for programs."""

from pathlib import Path

import msgspec

from loong.runs.report.answer import answer
from loong.runs.run_document import FILE_NAME
from loong.workloads.metrics.result import JSON
from loong.workloads.report.run_document import by_rule, measured, read_document


def print_end(folder: Path, summary: dict[str, JSON], *, is_json_printed: bool) -> None:
    """Print the sentences of each SLO rule, the report's path and, if asked for, a line of JSON."""
    rules = [runs for runs in by_rule(read_document(folder / FILE_NAME)) if runs.runs]
    for runs in rules:
        reported = answer(measured(runs))
        rule = f"{runs.rule.name}: " if len(rules) > 1 else ""
        print(f"{rule}{' '.join(reported.sentences)}")
    report = folder / "report.html"
    print(f"Report: {report if report.exists() else folder / FILE_NAME}", flush=True)
    if is_json_printed:
        print(msgspec.json.encode(summary).decode(), flush=True)
