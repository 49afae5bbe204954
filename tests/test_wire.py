"""Messages between engine and workers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import COMMANDS, INPUT, PLAN, REPORTS

from loong.core.instructions import RunBatch
from loong.wire import (
    Command,
    Report,
    Shutdown,
    WireError,
    decode_command,
    decode_report,
    encode,
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
    frame = encode(RunBatch(1, PLAN, (INPUT._replace(token_ids=range(2)),)))
    with pytest.raises(WireError, match=r"Expected `array`, got `bytes`.*inputs"):
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
