"""L-Eval: several questions on each long document, as text."""

from itertools import count
from pathlib import Path

import msgspec

from loong.workloads.datasets.json_lines import json_lines
from loong.workloads.datasets.recording import RecordedTrace, Row, bad
from loong.workloads.datasets.text import estimated_tokens
from loong.workloads.request import MIN_OUTPUT_TOKENS, RequestShape, TokenRun


class _Line(msgspec.Struct):
    input: str
    instructions: list[str]
    outputs: list[str]


def read_leval(path: Path) -> RecordedTrace:
    """Read a file of github.com/OpenLMLab/LEval (LEval-data): a document a line.

    Each of its `instructions` becomes a request. The prompt is the document, which they share, and the
    instruction; the answer is as long as the one of `outputs`. Lengths are `estimated_tokens`.
    """
    rows = []
    seeds = count()
    for number, line in json_lines(path, _Line):
        if len(line.instructions) != len(line.outputs):
            raise bad(
                path,
                f"line {number}",
                f"{len(line.instructions)} instructions have {len(line.outputs)} outputs",
            )
        document = TokenRun(next(seeds), estimated_tokens(line.input))
        for instruction, output in zip(line.instructions, line.outputs, strict=True):
            question = TokenRun(next(seeds), estimated_tokens(instruction))
            num_output = max(MIN_OUTPUT_TOKENS, estimated_tokens(output))
            rows.append(Row(None, RequestShape((document, question), num_output)))
    return RecordedTrace("L-Eval", tuple(rows))
