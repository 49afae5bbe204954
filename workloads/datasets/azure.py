"""Azure's LLM inference traces of 2023 and 2024: arrival times, and lengths of prompts and answers."""

from datetime import datetime
from pathlib import Path

from loong.workloads.datasets.csv_lines import CSVLine, csv_lines
from loong.workloads.datasets.recording import RecordedTrace, Row
from loong.workloads.request import RequestShape, TokenRun

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path) -> RecordedTrace:
    """Read a file of github.com/Azure/AzurePublicDataset; requests without an answer are left out.

    `TIMESTAMP` is a date and time, with a time zone in the trace of 2024.
    """
    rows = []
    start: datetime | None = None
    for line in csv_lines(path, COLUMNS):
        time = _time(line)
        start = start or time
        num_prompt, num_output = line.tokens("ContextTokens"), line.tokens("GeneratedTokens")
        if num_prompt and num_output:
            run = TokenRun(line.number, num_prompt)
            rows.append(Row((time - start).total_seconds(), RequestShape((run,), num_output)))
    return RecordedTrace("Azure LLM trace", tuple(rows))


def _time(line: CSVLine) -> datetime:
    text = line.text("TIMESTAMP")
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)  # all are UTC
    except ValueError:
        raise line.error(f"TIMESTAMP {text!r} is no time such as 2023-11-16 18:15:46.6805900") from None
