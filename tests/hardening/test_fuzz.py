"""A short while of what `benchmarks/fuzz.py` does for long."""

from collections.abc import Iterator

import pytest
from fuzzing import check_answer, check_frame, frames, requests, server_in_a_thread
from hypothesis import HealthCheck, given, settings

from loong.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    with server_in_a_thread(tokenizer) as found:
        yield found


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(request_bytes=requests())
def test_no_request_is_the_servers_fault(address: tuple[str, int], request_bytes: bytes) -> None:
    check_answer(address, request_bytes)


@given(frame=frames())
def test_every_frame_is_refused_or_understood(frame: bytes) -> None:
    check_frame(frame)
