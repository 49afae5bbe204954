"""LV-Eval: a question on each very long document, as text."""

from pathlib import Path
from typing import Annotated

import msgspec

from loong.workloads.datasets.json_lines import json_lines
from loong.workloads.datasets.recording import RecordedTrace, Row
from loong.workloads.datasets.text import estimated_tokens
from loong.workloads.request import MIN_OUTPUT_TOKENS, RequestShape, TokenRun


class _Line(msgspec.Struct):
    context: str
    input: str
    answers: Annotated[list[str], msgspec.Meta(min_length=1)]


def read_lveval(path: Path) -> RecordedTrace:
    """Read a file of github.com/infinigence/LVEval: `context`, `input` (a question) and `answers` a line.

    The prompt is the context and the question; the answer is as long as the first one. Lengths are
    `estimated_tokens`.
    """
    rows = []
    for number, line in json_lines(path, _Line):
        num_prompt = estimated_tokens(line.context) + estimated_tokens(line.input)
        num_output = max(MIN_OUTPUT_TOKENS, estimated_tokens(line.answers[0]))
        rows.append(Row(None, RequestShape((TokenRun(number, num_prompt),), num_output)))
    return RecordedTrace("LV-Eval", tuple(rows))
