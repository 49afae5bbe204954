"""A short run of `benchmarks/server/fuzz.py`."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from examples import examples
from extremes import extremes, wrong_answers
from fuzzing import check_answer, check_frame, frames, requests, server_in_a_thread, unharmed_server
from hypothesis import HealthCheck, given, settings
from served import Served

from loong.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    with server_in_a_thread(tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with unharmed_server(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@settings(examples(25, thorough=600), suppress_health_check=[HealthCheck.too_slow])
@given(request_bytes=requests())
def test_no_request_is_the_servers_fault(address: tuple[str, int], request_bytes: bytes) -> None:
    check_answer(address, request_bytes)


def test_no_extreme_of_any_field_is_the_servers_fault_and_refusals_name_it(server: Served) -> None:
    described = httpx.get(f"{server.url}/openapi.json", timeout=20).json()
    assert not asyncio.run(wrong_answers(server.url, extremes(described)))


@settings(examples(15, thorough=400), suppress_health_check=[HealthCheck.too_slow])
@given(request_bytes=requests(is_damaged=False))
def test_no_request_harms_an_engine(server: Served, request_bytes: bytes) -> None:
    check_answer(server.address, request_bytes)


@given(frame=frames())
def test_every_frame_is_refused_or_understood(frame: bytes) -> None:
    check_frame(frame)
