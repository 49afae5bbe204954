"""Processes that answer requests are bounded in time and memory, and one that ends costs no other request."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from child_processes import own_children

from loong.server.bounded_processes import BoundedProcesses, ProcessEndedError, UnusableProcessError

SUPPORT = Path(__file__).parents[1] / "support"
LONG = 60.0  # seconds that no request here needs
ASK = b"number of the process"


@pytest.fixture(autouse=True)
def _module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


@pytest_asyncio.fixture
async def processes() -> AsyncIterator[BoundedProcesses]:
    processes = BoundedProcesses("obedient_process")
    yield processes
    await processes.close()
    assert not own_children("obedient_process")


async def test_requests_behind_one_that_takes_too_long_are_answered(processes: BoundedProcesses) -> None:
    first = await processes.ask(ASK, LONG)
    late, *others = await asyncio.gather(
        processes.ask(b"wait", 0.1), *(processes.ask(ASK, LONG) for _ in range(3)), return_exceptions=True
    )
    assert isinstance(late, TimeoutError)
    assert len({*others}) == 1
    assert first not in others


async def test_a_request_that_ends_its_process_fails_alone(processes: BoundedProcesses) -> None:
    for end in (b"end", b"keep 10000000000"):
        ended, answer = await asyncio.gather(
            processes.ask(end, LONG), processes.ask(ASK, LONG), return_exceptions=True
        )
        assert isinstance(ended, ProcessEndedError)
        assert isinstance(answer, bytes)


async def test_a_request_is_not_blamed_for_a_process_that_had_ended(processes: BoundedProcesses) -> None:
    first = await processes.ask(ASK, LONG)
    os.kill(int(first), signal.SIGKILL)
    assert await processes.ask(ASK, LONG) != first


async def test_a_process_that_has_grown_is_replaced(processes: BoundedProcesses) -> None:
    first = await processes.ask(b"keep 10", LONG)
    assert await processes.ask(b"keep 300000000", LONG) == first
    assert await processes.ask(b"keep 300000000", LONG) != first


async def test_a_client_that_leaves_costs_no_process(processes: BoundedProcesses) -> None:
    first = await processes.ask(ASK, LONG)
    asking = asyncio.create_task(processes.ask(b"keep 100000", LONG))
    for _ in range(3):  # until the request is written
        await asyncio.sleep(0)
    asking.cancel()
    assert await processes.ask(ASK, LONG) == first


async def test_no_more_processes_start_than_are_allowed() -> None:
    processes = BoundedProcesses("obedient_process", most=2)
    answers = await asyncio.gather(*(processes.ask(ASK, LONG) for _ in range(20)))
    await processes.close()
    assert len({*answers}) == 2


async def test_large_requests_and_answers_are_whole() -> None:
    processes = BoundedProcesses("loong.server.text.template_process")
    text = "é" * 3_000_000
    request = b'{"source": "{{ text }}", "names": {"text": "%s"}}' % text.encode()
    answer = await processes.ask(request, LONG)
    await processes.close()
    assert answer[1:].decode() == text


async def test_closing_ends_a_busy_process(processes: BoundedProcesses) -> None:
    await processes.ask(ASK, LONG)
    asking = asyncio.create_task(processes.ask(b"wait", LONG))
    for _ in range(3):
        await asyncio.sleep(0)
    await processes.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_why_no_process_can_answer_is_reported(
    processes: BoundedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBEDIENT_PROCESS", "end")
    with pytest.raises(UnusableProcessError, match=r"obedient_process ended with code 7 at its start"):
        await processes.ask(ASK, LONG)
    monkeypatch.setenv("OBEDIENT_PROCESS", "refuse")
    for _ in range(2):
        with pytest.raises(UnusableProcessError, match="it is told to refuse"):
            await processes.ask(ASK, LONG)
