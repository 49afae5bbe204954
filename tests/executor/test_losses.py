"""The worker that is named, of those that fail together."""

import asyncio
from typing import Any

import pytest

from loong.core.placement import InstanceId
from loong.executor.losses import Losses
from loong.messages.wire import WorkerFailed

SOON = 0.01
NEVER = 600.0


class Declared:
    """The declared losses, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[InstanceId, str]] = []
        self.first = asyncio.Event()

    def __call__(self, instance_id: InstanceId, reason: str) -> None:
        self.all.append((instance_id, reason))
        self.first.set()


def blaming(reporter: int, blamed: int) -> WorkerFailed:
    return WorkerFailed(reporter, 0, f"instance {blamed} did nothing", (blamed, 0))


async def test_the_end_of_a_process_is_named_before_those_that_reported_it() -> None:
    losses = Losses(declared := Declared(), NEVER)
    losses.take(blaming(0, 2))
    losses.take(blaming(1, 2))
    losses.end((0, 0), "exited with code 1")
    losses.end((1, 0), "exited with code 1")
    assert not declared.all
    losses.end((2, 0), "was killed by signal 9")
    ended = [(0, "exited with code 1"), (1, "exited with code 1")]
    assert declared.all == [(2, "was killed by signal 9"), *ended], "they are lost, too, but after it"


async def test_an_error_of_its_own_is_named_at_once_whatever_others_reported_before() -> None:
    losses = Losses(declared := Declared(), NEVER)
    losses.take(blaming(0, 1))
    losses.take(WorkerFailed(1, 0, "KeyError: 'nobody'"))
    losses.end((1, 0), "exited with code 1")
    losses.take(WorkerFailed(2, 0, "instance 1 is lost", (1, 0)))
    assert declared.all == [(1, "KeyError: 'nobody'")]


async def test_each_instance_that_fails_by_itself_is_named_once_until_it_rejoins() -> None:
    losses = Losses(declared := Declared(), NEVER)
    losses.take(WorkerFailed(1, 0, "KeyError: 'nobody'"))
    losses.take(WorkerFailed(2, 0, "out of memory"))
    losses.end((1, 0), "exited with code 1")
    losses.rejoin(1)
    losses.end((1, 0), "was killed by signal 9")
    reasons = [(1, "KeyError: 'nobody'"), (2, "out of memory"), (1, "was killed by signal 9")]
    assert declared.all == reasons


async def test_a_rank_that_ends_is_named_though_another_of_its_instance_has_reported() -> None:
    losses = Losses(declared := Declared(), NEVER)
    losses.take(WorkerFailed(1, 1, "rank 0 is lost", (1, 0)))
    losses.end((1, 0), "was killed by signal 9")
    assert declared.all == [(1, "was killed by signal 9")]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(0, 1), (1, 2)], (2, "instance 1 reported: instance 2 did nothing")),  # it hangs, but is there
        ([(0, 1), (1, 0)], (0, "instance 1 did nothing")),  # both are there: their link is not
    ],
)
async def test_if_nobody_ends_it_is_one_that_others_blame_and_that_blames_nobody(
    reports: list[tuple[int, int]], expected: tuple[int, str]
) -> None:
    losses = Losses(declared := Declared(), SOON)
    for reporter, blamed in reports:
        losses.take(blaming(reporter, blamed))
        losses.end((reporter, 0), "exited with code 1")
    await declared.first.wait()
    assert declared.all[0] == expected
    assert {instance_id for instance_id, _ in declared.all} >= {reporter for reporter, _ in reports}


async def test_reports_after_a_loss_wait_in_full_for_the_end_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def note(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", note)
    losses = Losses(declared := Declared(), NEVER)
    losses.take(blaming(0, 1), lives_on=True)
    losses.end((1, 0), "was killed by signal 9")
    losses.rejoin(1)
    losses.take(blaming(0, 1), lives_on=True)
    assert [timer.cancelled() for timer in timers] == [True, False]
    losses.end((1, 0), "was killed by signal 9")
    assert declared.all == [(1, "was killed by signal 9")] * 2
    assert timers[-1].cancelled()
