"""Our own files of requests: a workload written down, so that others can send the same requests."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from loong.workloads.datasets.json_lines import json_lines
from loong.workloads.datasets.recording import RecordedTrace, Row, bad
from loong.workloads.request import RequestShape, TokenRun, Turn, WorkloadRequest

_Seed = Annotated[int, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class _Turn(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    session_id: _Seed
    number: Annotated[int, msgspec.Meta(ge=0)]
    num_turns: Annotated[int, msgspec.Meta(ge=1)]
    think_time: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    arrival_time: Annotated[float, msgspec.Meta(ge=0)]
    prompt: Annotated[list[tuple[_Seed, _Tokens]], msgspec.Meta(min_length=1)]
    num_output_tokens: _Tokens
    user: str = ""
    turn: _Turn | None = None


def read_saved(path: Path) -> RecordedTrace:
    """Read the requests that `save_requests` has written, exactly."""
    rows: list[Row] = []
    for number, line in json_lines(path, _Line):
        prompt = tuple(TokenRun(seed, num_tokens) for seed, num_tokens in line.prompt)
        turn = None if line.turn is None else Turn(*msgspec.structs.astuple(line.turn))
        shape = RequestShape(prompt, line.num_output_tokens, line.user, turn)
        if turn is not None:
            _check_turn(path, number, turn, rows[-1].shape.turn if rows else None)
        if shape.is_follower:
            before = rows[-1].shape
            shape = shape.after(before, before.num_output_tokens)
        rows.append(Row(line.arrival_time, shape))
    return RecordedTrace("loong's requests", tuple(rows), keeps_seeds=True)


def _check_turn(path: Path, line: int, turn: Turn, before: Turn | None) -> None:
    """Raise `ConfigError` unless the turn is one of its session, and the line before has the turn before."""
    if turn.number >= turn.num_turns:
        problem = f"turn {turn.number} (from 0) is beyond the {turn.num_turns} turns of its session"
        raise bad(path, f"line {line}", problem)
    expected, came = (
        _words(replace(turn, number=turn.number - 1)),
        "no turn" if before is None else _words(before),
    )
    if not turn.is_first and expected != came:
        raise bad(path, f"line {line}", f"the request before must be {expected}, and is {came}")


def _words(turn: Turn) -> str:
    return f"turn {turn.number} of {turn.num_turns} of session {turn.session_id}"


def save_requests(path: Path, requests: Iterable[WorkloadRequest]) -> int:
    """Write a request a line, and return how many.

    `prompt` is a list of [seed, number of tokens]: prompts whose first seeds are the same share a prefix. A
    later turn of a session has only its new runs.

    Raises:
        OSError: the file cannot be written.
    """
    num_requests = 0
    with path.open("wb") as file:
        for request in requests:
            file.write(msgspec.json.encode(_line(request)) + b"\n")
            num_requests += 1
    return num_requests


def _line(request: WorkloadRequest) -> _Line:
    shape = request.shape
    turn = None
    if shape.turn is not None:
        session_id, number = shape.turn.session_id, shape.turn.number
        turn = _Turn(session_id, number, shape.turn.num_turns, shape.turn.think_time)
    prompt = [(run.seed, run.num_tokens) for run in shape.new_runs]
    return _Line(request.arrival_time, prompt, shape.num_output_tokens, shape.user, turn)
