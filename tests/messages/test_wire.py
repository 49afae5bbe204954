"""Messages between engine and workers."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_samples import COMMANDS, INPUT, PLAN, REPORTS

from loong.core.errors import InvalidRequestError
from loong.core.instructions import RunBatch, RunScoredBatch
from loong.core.limits import LIMITS
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import SLO, NewRequest, SamplingParams
from loong.messages.wire import (
    Command,
    Report,
    Shutdown,
    WireError,
    decode_command,
    decode_report,
    encode,
)
from loong.server.remote.messages import Submit, decode_call


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
    for decode in (decode_command, decode_report):
        with pytest.raises(WireError):
            decode(frame)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMES = st.sampled_from([type(message).__name__ for message in (*COMMANDS, *REPORTS)])
FIELDS = st.sampled_from(
    sorted({name for message in (*COMMANDS, *REPORTS) for name in msgspec.to_builtins(message, enc_hook=str)})
)


@given(NAMES, st.dictionaries(FIELDS, JSON) | JSON)
def test_a_body_of_any_shape_is_refused_or_read(name: str, body: object) -> None:
    frame = msgspec.msgpack.encode((name, body))
    for decode in (decode_command, decode_report):
        with suppress(WireError):
            decode(frame)


@given(st.data())
def test_a_part_of_a_message_is_refused(data: st.DataObject) -> None:
    frame = encode(data.draw(st.sampled_from((*COMMANDS, *REPORTS))))
    part = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for decode in (decode_command, decode_report):
        with pytest.raises(WireError):
            decode(part)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    start = msgspec.msgpack.encode(("Heartbeat", 0))[:-1]
    with pytest.raises(WireError, match="recursion"):
        decode_report(start + b"\x91" * 100_000 + b"\x00")


def test_an_error_does_not_say_all_of_a_name_that_is_long() -> None:
    with pytest.raises(WireError) as refusal:
        decode_report(msgspec.msgpack.encode(("x" * 10**6, 0)))
    assert len(str(refusal.value)) < 200


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
    with pytest.raises(WireError, match="not a message"):
        decode_command(frame)


FAR = [
    sign * 2**power + step for power in (0, 31, 53, 63, 64, 400) for sign in (1, -1) for step in (-1, 0, 1)
]
OF_REQUEST = {"n": "num_choices", "priority": "priority", "prompt_logprobs": "num_prompt_logprobs"}
OF_SAMPLING: dict[str, Callable[[float], dict[str, object]]] = {
    "logprobs": lambda number: {"num_logprobs": number},
    "logit_bias": lambda number: {"logit_bias": ((5, number),)},
    "allowed token": lambda number: {"allowed_token_ids": (number,)},
    "token of a bad word": lambda number: {"bad_words": ((5, number),)},
    "biased token": lambda number: {"logit_bias": ((number, 1.0),)},
    "stop_token_ids": lambda number: {"stop_token_ids": (5, number)},
}


def request_with(name: str, number: float) -> NewRequest:
    """Return a request of which one number is chosen."""
    params: dict[str, Any] = {}
    of_request: dict[str, Any] = {}
    if name in ("ttft", "tpot"):
        of_request["slo"] = SLO(**{name: number})
    elif name in OF_REQUEST:
        of_request[OF_REQUEST[name]] = number
    else:
        params = OF_SAMPLING[name](number) if name in OF_SAMPLING else {name: number}
    return NewRequest("r", [1], SamplingParams(**params), **of_request)


@pytest.mark.parametrize("name", [*LIMITS, *sorted(OF_SAMPLING.keys() - LIMITS.keys())])
@given(data=st.data())
def test_whatever_number_a_request_is_accepted_with_it_can_be_sent(name: str, data: st.DataObject) -> None:
    is_whole = isinstance(LIMITS.get(name, (0, 0))[0], int)
    number = data.draw(st.sampled_from(FAR) | (st.integers() if is_whole else st.floats()))
    try:
        request = request_with(name, number)
    except InvalidRequestError:
        return
    assert decode_call(encode(Submit(request))) == Submit(request)
    inputs = (INPUT._replace(sampling_params=request.sampling_params),)
    scored = (ScoredChunk("r", 5, request.num_prompt_logprobs or 0),)
    for run in (RunBatch(1, PLAN, inputs), RunScoredBatch(1, PLAN, inputs, scored)):
        assert decode_command(encode(run)) == run
