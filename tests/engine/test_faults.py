"""Injected faults reach the processes of one live instance."""

import signal

import pytest
from raw_http import until

from loong.core.errors import InvalidRequestError
from loong.engine.faults import FaultKind, WorkerFaults


class Instances:
    """Instances of two processes each, and the signals that these get."""

    def __init__(self, *live_ids: int) -> None:
        self.live_ids = {*live_ids}
        self.sent: list[tuple[int, int, int]] = []
        self.faults = WorkerFaults(
            lambda i: [lambda number, rank=rank: self.sent.append((i, rank, number)) for rank in range(2)],  # type: ignore[misc]
            lambda: self.live_ids,
        )

    def kill(self, instance_id: int | None = None) -> int:
        return self.faults.inject(FaultKind.KILL, instance_id, 1.0)


def test_all_processes_of_the_instance_are_killed_and_no_others() -> None:
    instances = Instances(0, 1, 2)
    assert instances.kill(1) == 1
    assert instances.sent == [(1, 0, signal.SIGKILL), (1, 1, signal.SIGKILL)]


def test_instances_have_faults_in_turn() -> None:
    instances = Instances(0, 1, 2)
    assert instances.kill(1) == 1
    assert [instances.kill() for _ in range(4)] == [0, 2, 1, 0]
    instances.live_ids.discard(2)
    assert [instances.kill() for _ in range(3)] == [1, 0, 1]


def test_an_instance_that_is_not_live_is_refused_by_name() -> None:
    instances = Instances(0, 2)
    with pytest.raises(InvalidRequestError, match=r"instance 1 is not live; live are \[0, 2\]"):
        instances.kill(1)
    with pytest.raises(InvalidRequestError, match="no instance is live"):
        Instances().kill()
    assert not instances.sent


async def test_the_same_processes_go_on_after_a_pause() -> None:
    instances = Instances(0)
    instances.faults.inject(FaultKind.PAUSE, None, 0.01)
    assert instances.sent == [(0, 0, signal.SIGSTOP), (0, 1, signal.SIGSTOP)]
    await until(lambda: len(instances.sent) == 4)
    assert instances.sent[2:] == [(0, 0, signal.SIGCONT), (0, 1, signal.SIGCONT)]
