"""Instances come and go by the word of their workers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from loong.core.events import Event, InstanceJoined
from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.executor.endpoints import Endpoints
from loong.executor.membership import Membership
from loong.executor.recovery import Backoff, Failures, Restarts
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import WorkerReady


async def joined_again(folder: Path, planned: Service, reported: Service) -> Event:
    """Return the event of an instance that was lost, and whose new worker reports what it serves."""
    commands = {(i, 0): f"ipc://{folder}/{i}" for i in range(2)}
    instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100, serves=planned) for i in range(2))
    restarts = Restarts(
        start=lambda *_: None,
        end=lambda _: None,
        retire=lambda _: None,
        instances=instances,
        processes_of=lambda _: (),
        failures=Failures(Backoff()),
    )
    events: list[Callable[[float], Event]] = []
    endpoints = Endpoints(f"ipc://{folder}/reports", commands, num_instances=2)
    membership = Membership(endpoints, 1.0, StrayFrames("reports"), events.append, restarts)
    for instance_id in range(2):
        membership.take_ready(WorkerReady(instance_id, 0, commands[instance_id, 0], planned))
    membership.drop(1)
    membership.lose(1, "killed")
    membership.expect({(1, 0): f"ipc://{folder}/1-1"})
    assert membership.take_ready(WorkerReady(1, 0, f"ipc://{folder}/1-1", reported))
    membership.join(1)
    membership.sockets.close()
    return events[-1](0.0)


def test_an_instance_that_joins_again_serves_what_its_worker_reports(tmp_path: Path) -> None:
    event = asyncio.run(joined_again(tmp_path, Service.OWN_HOST, Service.NONE))
    assert isinstance(event, InstanceJoined)
    assert (event.instance.instance_id, event.instance.serves) == (1, Service.NONE)
