"""Our own files of requests: a workload written down, so that others can send the same requests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from loong.workloads.datasets.json_lines import json_lines
from loong.workloads.datasets.recording import RecordedTrace, Row
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

_Seed = Annotated[int, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    arrival_time: Annotated[float, msgspec.Meta(ge=0)]
    prompt: Annotated[list[tuple[_Seed, _Tokens]], msgspec.Meta(min_length=1)]
    num_output_tokens: _Tokens
    user: str = ""


def read_saved(path: Path) -> RecordedTrace:
    """Read the requests that `save_requests` has written, exactly."""
    rows = []
    for _, line in json_lines(path, _Line):
        prompt = tuple(TokenRun(seed, num_tokens) for seed, num_tokens in line.prompt)
        rows.append(Row(line.arrival_time, RequestShape(prompt, line.num_output_tokens, line.user)))
    return RecordedTrace("loong's requests", tuple(rows), keeps_seeds=True)


def save_requests(path: Path, requests: Iterable[WorkloadRequest]) -> int:
    """Write a request a line, and return how many.

    `prompt` is a list of [seed, number of tokens]: prompts whose first seeds are the same share a prefix.

    Raises:
        OSError: the file cannot be written.
    """
    num_requests = 0
    with path.open("wb") as file:
        for request in requests:
            prompt = [(run.seed, run.num_tokens) for run in request.shape.prompt]
            shape = request.shape
            line = _Line(request.arrival_time, prompt, shape.num_output_tokens, shape.user)
            file.write(msgspec.json.encode(line) + b"\n")
            num_requests += 1
    return num_requests
