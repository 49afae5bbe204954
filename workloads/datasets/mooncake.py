"""Mooncake's traces: times, lengths, and the blocks that prompts share."""

from pathlib import Path
from typing import Annotated

import msgspec

from loong.workloads.datasets.json_lines import json_lines
from loong.workloads.datasets.recording import RecordedTrace, Row, bad
from loong.workloads.request import RequestShape, TokenRun

BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Count
    hash_ids: list[_Count] = []


def read_mooncake(path: Path) -> RecordedTrace:
    """Read a file of github.com/kvcache-ai/Mooncake (FAST25-release/traces); `timestamp` is in milliseconds.

    Each of `hash_ids` stands for a block of 512 tokens and all tokens before it. The last block may have
    fewer. Prompts whose first ids are equal share those blocks. Tokens beyond a prompt's ids are private.
    Requests without an answer are left out.
    """
    rows = []
    for number, line in json_lines(path, _Line):
        num_blocks = -(-line.input_length // BLOCK_TOKENS)
        if len(line.hash_ids) > num_blocks:
            problem = (
                f"{len(line.hash_ids)} hash_ids, but an input_length of {line.input_length} has {num_blocks}"
            )
            raise bad(path, f"line {number}", f"{problem} blocks of {BLOCK_TOKENS}")
        if line.output_length:
            shape = RequestShape(_prompt(line, number), line.output_length)
            rows.append(Row(line.timestamp / 1000, shape))
    return RecordedTrace("Mooncake trace", tuple(rows))


def _prompt(line: _Line, number: int) -> tuple[TokenRun, ...]:
    runs = []
    num_left = line.input_length
    for hash_id in line.hash_ids:
        runs.append(TokenRun(hash_id, min(BLOCK_TOKENS, num_left)))
        num_left -= runs[-1].num_tokens
    if num_left:
        runs.append(TokenRun(-number, num_left))  # no block has a number below 0
    return tuple(runs)
