"""The number of instances that an operator asks for is checked, reached step by step, or replaced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from loong.core.errors import (
    ClusterError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    RequestTooLargeError,
)
from loong.core.events import Event, InstanceDraining, InstanceJoined, InstanceLeft, InstanceLost
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import Placement
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.engine.cluster_size import InstanceState
from loong.engine.scaling import Scaling
from loong.executor.endpoints import Endpoints
from loong.executor.membership import Membership
from loong.executor.recovery import Backoff, Failures, Restarts
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import WorkerReady

POOL, FIRST, MOST = 100, 2, 4


def full(instance_id: int) -> ElasticInstance:
    return ElasticInstance(instance_id, 1, InstanceKind.FULL, POOL)


class Machine:
    """Real scaling and membership. Processes start and end, and instances are empty, when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[tuple[str, int]] = []
        self.events: list[Event] = []
        self.snapshot = Snapshot(0.0, tuple(map(full, range(FIRST))))
        commands = {(i, 0): f"ipc://{folder}/{i}" for i in range(FIRST)}
        restarts = Restarts(
            lambda i, _: self.calls.append(("start", i)),
            lambda i: self.calls.append(("end", i)),
            lambda i: self.calls.append(("retire", i)),
            tuple(map(full, range(MOST))),
            lambda _: (),
            Failures(Backoff(max_failures=2)),
        )
        self._folder = folder
        endpoints = Endpoints(f"ipc://{folder}/reports", commands, MOST)
        self.members = Membership(endpoints, 1.0, StrayFrames("reports"), self._report, restarts)
        self.scaling = Scaling(self.members, FIRST, MOST, POOL, self._check, lambda ids: POOL * len(set(ids)))

    def _report(self, event_at: Callable[[float], Event]) -> None:
        self.events.append(event_at(0.0))

    def _check(self, num_instances: int) -> None:
        if num_instances == 3:
            raise ConfigError("groups of 2 instances, which do not divide 3")

    def scale(self, num_instances: int, *views: RequestView) -> None:
        self.scaling.scale(num_instances, replace(self.snapshot, running=views))

    def expect(self, instance_id: int) -> None:
        """Let the process of a started instance begin."""
        self.members.expect({(instance_id, 0): f"ipc://{self._folder}/{instance_id}-1"})

    def be_ready(self, instance_id: int) -> None:
        """Let a started instance be ready."""
        self.expect(instance_id)
        assert self.members.take_ready(WorkerReady(instance_id, 0))
        self.members.join(instance_id)

    def turn(self) -> list[Event]:
        """Let the engine apply all events and plan; return the events."""
        events, self.events = self.events, []
        instances, returning = self.snapshot.instance.copy(), dict(self.snapshot.returning)
        for event in events:
            match event:
                case InstanceJoined():
                    instances[event.instance.instance_id] = event.instance
                    returning.pop(event.instance.instance_id, None)
                case InstanceDraining():
                    instances[event.instance_id] = replace(instances[event.instance_id], is_draining=True)
                case InstanceLost():
                    returning[event.instance_id] = instances.pop(event.instance_id).kv_capacity
                case InstanceLeft():
                    assert (instances.pop(event.instance_id, None) is None) == (
                        event.instance_id in returning
                    )
                    returning.pop(event.instance_id, None)
        self.snapshot = Snapshot(0.0, tuple(instances.values()), returning=returning)
        self.scaling.on_plan(events, self.snapshot, IterationPlan(), ())
        return events

    def states(self) -> dict[int, InstanceState]:
        return {i.instance_id: i.state for i in self.scaling.size(self.snapshot).instances}


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    found = Machine(tmp_path)
    yield found
    found.members.sockets.close()
    with suppress(asyncio.InvalidStateError):
        found.members.ready.cancel()


async def test_instances_are_started_and_join(machine: Machine) -> None:
    machine.scale(4)
    assert machine.calls == [("start", 2), ("start", 3)]
    assert machine.states()[2] is InstanceState.STARTING
    waiting = asyncio.create_task(machine.scaling.wait())
    machine.be_ready(3)
    machine.turn()
    assert machine.states()[3] is InstanceState.SERVING
    assert machine.scaling.max_request_kv == 3 * POOL, "it may be that the other one never comes"
    machine.be_ready(2)
    machine.turn()
    await waiting
    assert machine.scaling.size(machine.snapshot).is_done
    assert machine.scaling.max_request_kv == 4 * POOL


async def test_an_instance_leaves_when_it_is_empty(machine: Machine) -> None:
    machine.snapshot = replace(machine.snapshot, instances=(full(0), full(1).using(5)))
    machine.scale(1)
    assert machine.scaling.max_request_kv == POOL, "what comes from now on must fit what will be left"
    assert isinstance(machine.turn()[0], InstanceDraining)
    assert machine.states()[1] is InstanceState.DRAINING
    assert not machine.calls
    draining = replace(full(1), is_draining=True)
    machine.snapshot = replace(machine.snapshot, instances=(full(0), draining))
    machine.turn()
    assert machine.calls == [("retire", 1)]
    assert isinstance(machine.turn()[0], InstanceLeft)
    assert machine.states() == {0: InstanceState.SERVING}
    await machine.scaling.wait()  # returns at once


async def test_a_changed_limit_is_reported(machine: Machine) -> None:
    limits: list[int] = []
    machine.scaling.report_limit = lambda: limits.append(machine.scaling.max_request_kv)
    machine.scale(1)
    machine.turn()
    machine.turn()
    machine.scale(2)
    machine.be_ready(1)
    machine.turn()
    assert limits == [POOL, 2 * POOL]


async def test_the_limit_falls_with_a_quarantine_and_rises_when_the_instance_joins_again(
    machine: Machine,
) -> None:
    limits: list[int] = []
    machine.scaling.report_limit = lambda: limits.append(machine.scaling.max_request_kv)
    machine.members.drop(1)
    machine.members.lose(1, "killed")
    machine.turn()
    assert machine.states()[1] is InstanceState.LOST
    assert not limits, "requests wait for an instance that is being started again"
    machine.members.start_again(1)
    machine.turn()
    assert machine.states()[1] is InstanceState.QUARANTINED
    assert limits == [POOL]
    machine.scale(2)
    machine.turn()
    assert limits == [POOL]
    machine.be_ready(1)
    machine.turn()
    assert limits == [POOL, 2 * POOL]


async def test_one_that_is_wanted_again_leaves_first_and_is_then_started(machine: Machine) -> None:
    machine.scale(1)
    machine.scale(2)
    machine.turn()
    assert machine.calls == [("retire", 1), ("start", 1)]
    machine.be_ready(1)
    assert [type(event) for event in machine.turn()] == [InstanceLeft, InstanceJoined]
    assert machine.scaling.size(machine.snapshot).is_done


async def test_one_that_is_starting_is_given_up(machine: Machine) -> None:
    machine.scale(4)
    machine.expect(2)
    machine.calls.clear()
    machine.scale(2)
    assert machine.calls == [("end", 3), ("retire", 3), ("end", 2), ("retire", 2)]
    assert not machine.events, "the state has never known them"
    assert machine.scaling.size(machine.snapshot).is_done


async def test_one_that_is_lost_while_it_drains_leaves(machine: Machine) -> None:
    machine.scale(1)
    machine.members.drop(1)  # as its loss does, which is not reported yet
    machine.turn()
    assert not machine.calls
    machine.members.lose(1, "killed")
    assert machine.calls == [("retire", 1)]
    assert [type(event) for event in machine.turn()] == [InstanceLost, InstanceLeft]
    assert machine.scaling.size(machine.snapshot).is_done


async def test_one_that_is_lost_does_not_return_if_it_is_to_leave(machine: Machine) -> None:
    machine.members.drop(1)
    machine.members.lose(1, "killed")
    machine.turn()
    assert machine.calls == [("start", 1)]
    assert machine.states()[1] is InstanceState.LOST
    machine.calls.clear()
    machine.scale(1)
    assert machine.calls == [("end", 1), ("retire", 1)]
    assert isinstance(machine.turn()[0], InstanceLeft)
    assert machine.states() == {0: InstanceState.SERVING}


@pytest.mark.parametrize(
    ("num_instances", "reason"),
    [(0, "from 1 to 4"), (5, "from 1 to 4, which is --max-instances"), (3, "groups of 2")],
)
async def test_other_numbers_are_refused(machine: Machine, num_instances: int, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        machine.scale(num_instances)
    assert refusal.value.param == "num_instances"
    assert not machine.calls


async def test_a_live_request_that_would_not_fit_is_named(machine: Machine) -> None:
    large = RequestView("large", 90, 1, 12, 0.0, None, Placement())
    ended = replace(large, request_id="ended", max_tokens=50, has_ended=True)
    with pytest.raises(RequestTooLargeError, match=r"large may need KV for 101 tokens.* that of 100"):
        machine.scale(1, large, ended)
    assert machine.scaling.size(machine.snapshot).num_instances == FIRST
    machine.scale(1, replace(large, max_tokens=11), ended)


async def test_those_that_wait_are_answered_when_the_engine_stops(machine: Machine) -> None:
    machine.scale(4)
    waiting, leaving = (asyncio.create_task(machine.scaling.wait()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    machine.scaling.stop()
    with pytest.raises(EngineStoppedError):
        await waiting


async def test_a_change_ends_with_an_error_if_an_instance_is_quarantined_and_may_be_asked_for_again(
    machine: Machine,
) -> None:
    machine.scale(4)
    waiting = asyncio.create_task(machine.scaling.wait())
    machine.be_ready(3)
    machine.turn()
    await asyncio.sleep(0)
    machine.members.start_again(2)
    assert machine.calls[-1] == ("start", 2)
    machine.members.start_again(2)
    assert machine.calls[-1] == ("retire", 2)
    machine.turn()
    with pytest.raises(ClusterError, match=r"instances \[2\] do not start, and are quarantined"):
        await waiting
    assert machine.states()[2] is InstanceState.QUARANTINED
    machine.scale(4)
    assert machine.calls[-1] == ("start", 2)
    assert machine.states()[2] is InstanceState.STARTING
