"""Messages between engine and workers."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.events import Logprobs, ProducedToken
from loong.core.instance import ESPGroup
from loong.core.instructions import MoveKV, ReleaseKV, RequestInput, RunBatch, StopLease
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import FinishReason, SamplingParams
from loong.wire import (
    BatchDone,
    Command,
    Heartbeat,
    MigrationDone,
    Report,
    Shutdown,
    StepDone,
    WireError,
    WorkerFailed,
    WorkerReady,
    decode_command,
    decode_report,
    encode,
)

GROUP = ESPGroup((2, 0))
SEGMENT = KVSegment("r", range(1, 9, 2), 2)
PLAN = BatchPlan(GROUP, (QueryBlock("r", range(9, 10), 0, Transfer.QUERY),), (SEGMENT,), num_steps=3)
INPUT = RequestInput(
    "r", [5, 6], 9, 1, Placement((SEGMENT,)), SamplingParams(stop_token_ids=(1, 2)), [5], [6]
)
COMMANDS: tuple[Command, ...] = (
    RunBatch(1, PLAN, (INPUT,)),
    StopLease(1, GROUP, 4),
    MoveKV(2, KVMigration(SEGMENT, 0)),
    ReleaseKV("r", (0, 2)),
    ReleaseKV("r", (0,), range(3)),
    Shutdown(),
)
REPORTS: tuple[Report, ...] = (
    WorkerReady(0, 1),
    Heartbeat(0, 1),
    StepDone(1, 0, (ProducedToken("r", 7, FinishReason.STOP, Logprobs(-0.5, ((7, -0.5), (8, -1.0)))),)),
    BatchDone(1, 0, 0, 3),
    MigrationDone(2, 0, 0, is_committed=False),
    WorkerFailed(0, 0, "no room"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_command_arrives_as_it_was_sent(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: type(r).__name__)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    assert decode_report(encode(report)) == report


def test_a_report_is_no_command_and_a_command_no_report() -> None:
    for report in REPORTS:
        with pytest.raises(WireError):
            decode_command(encode(report))
    for command in COMMANDS:
        with pytest.raises(WireError):
            decode_report(encode(command))


def test_a_range_is_never_taken_for_token_ids() -> None:
    frame = encode(RunBatch(1, PLAN, (replace(INPUT, token_ids=range(2)),)))
    with pytest.raises(WireError, match="token_ids"):
        decode_command(frame)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_command(frame)


@given(st.data())
def test_a_damaged_command_is_refused_or_read_as_some_command(data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(st.sampled_from(COMMANDS))))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        command = decode_command(bytes(frame))
    except WireError:
        return
    assert encode(decode_command(encode(command))) == encode(command)


def test_a_plan_that_breaks_its_own_types_is_refused() -> None:
    body = msgspec.to_builtins(Shutdown())
    frame = msgspec.msgpack.encode(("MoveKV", {**body, "migration_id": "two"}))
    with pytest.raises(WireError, match="no message"):
        decode_command(frame)
