"""BurstGPT: months of ChatGPT and GPT-4 requests of a campus."""

import math
from pathlib import Path

from loong.workloads.datasets.csv_lines import CSVLine, csv_lines
from loong.workloads.datasets.recording import RecordedTrace, Row
from loong.workloads.request import RequestShape, TokenRun

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path) -> RecordedTrace:
    """Read a file of github.com/HPMLL/BurstGPT; failed requests, which have no response tokens, are left out.

    `Timestamp` is in seconds since the first day's midnight.
    """
    rows = []
    for line in csv_lines(path, COLUMNS):
        num_prompt, num_output = line.tokens("Request tokens"), line.tokens("Response tokens")
        if num_prompt and num_output:
            rows.append(Row(_time(line), RequestShape((TokenRun(line.number, num_prompt),), num_output)))
    return RecordedTrace("BurstGPT trace", tuple(rows))


def _time(line: CSVLine) -> float:
    text = line.text("Timestamp")
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise line.error(f"Timestamp {text!r} is no number of seconds")
    return time
