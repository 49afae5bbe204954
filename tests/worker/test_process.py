"""The end of a worker, as the engine knows it."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from child_processes import own_forked
from families import write_tiny_model

from loong.core.events import BatchFinished, Event, InstanceLost, TokensProduced
from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import SamplingParams
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.start import local_workers
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.processes.fork_server import ForkServer

WORKER = "loong.worker.process"


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """Start what starts the workers of every test here."""
    with closing(worker_fork_server()) as server:
        yield server


async def test_a_worker_that_fails_says_why_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    of_nobody = BatchPlan(
        ESPGroup((0,)),
        (QueryBlock("nobody", range(3), 0, Transfer.KV),),
        (KVSegment("nobody", range(3), 0),),
    )
    async with local_workers(ClusterConfig(str(folder), num_instances=1, kv_capacity=64)) as executor:
        executor.submit([RunBatch(1, of_nobody, ())])
        events: list[Event] = []
        while not (losses := [event for event in events if isinstance(event, InstanceLost)]):
            events += await executor.next_events()
    event = losses[0]
    assert (event.instance_id, event.reason) == (0, "KeyError: 'nobody'")
    reported = capfd.readouterr().err
    assert reported.count("Traceback") == 1, reported


@pytest.mark.parametrize("victim", range(3))
async def test_a_worker_that_is_killed_in_a_ring_is_named_and_not_one_that_waited_for_it(
    tmp_path: Path, fork_server: ForkServer, victim: int
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    config = ClusterConfig(str(folder), num_instances=3, kv_capacity=4096)
    others = own_forked(WORKER)  # of clusters that other tests keep
    async with local_workers(config, fork_server=fork_server) as executor:
        pid = own_forked(WORKER, others)[victim]
        executor.submit([ring_prefill(number) for number in range(1, 101)])
        while not any(isinstance(event, BatchFinished) for event in await executor.next_events()):
            pass
        os.kill(pid, signal.SIGKILL)  # in the ring of one of the other hundred
        while not (lost := [e for e in await executor.next_events() if isinstance(e, InstanceLost)]):
            pass
    assert [(event.instance_id, event.reason) for event in lost] == [
        (victim, f"its process {pid} was killed by signal 9")
    ]


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_holder_or_a_member_that_is_killed_ends_a_served_lease_and_is_named(
    tmp_path: Path, fork_server: ForkServer, victim: int
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    config = ClusterConfig(str(folder), num_instances=2, kv_capacity=8192)
    others = own_forked(WORKER)  # of clusters that other tests keep
    async with local_workers(config, fork_server=fork_server) as executor:
        pid = own_forked(WORKER, others)[victim]
        executor.submit([prefill_on_the_first()])
        while not any(isinstance(event, BatchFinished) for event in await executor.next_events()):
            pass
        executor.submit([lease_on_the_second()])
        while not any(isinstance(event, TokensProduced) for event in await executor.next_events()):
            pass
        os.kill(pid, signal.SIGKILL)
        while not (lost := [e for e in await executor.next_events() if isinstance(e, InstanceLost)]):
            pass
    assert [(event.instance_id, event.reason) for event in lost] == [
        (victim, f"its process {pid} was killed by signal 9")
    ]


def prefill_on_the_first() -> RunBatch:
    """A prompt of 16 tokens, computed and kept on instance 0."""
    block = QueryBlock("served", range(16), 0, Transfer.QUERY)
    plan = BatchPlan(ESPGroup((0,)), (block,), (KVSegment("served", range(16), 0),))
    given = RequestInput("served", [5] * 16, 16, 0, Placement(), SamplingParams(max_tokens=7000))
    return RunBatch(1, plan, (given,))


def lease_on_the_second() -> RunBatch:
    """Thousands of decode steps on instance 1, of which each reads the prompt on instance 0."""
    block, placement = (
        QueryBlock("served", range(16, 17), 1, Transfer.QUERY),
        KVSegment("served", range(16), 0),
    )
    writes = (KVSegment("served", range(16, 7015), 1),)
    plan = BatchPlan(ESPGroup((1,)), (block,), writes, num_steps=6999)
    params = SamplingParams(max_tokens=7000)
    return RunBatch(2, plan, (RequestInput("served", [5], 16, 1, Placement((placement,)), params),))


def ring_prefill(number: int) -> RunBatch:
    """Return a batch of one prompt, striped over three instances."""
    owner_id, group, length = f"request-{number}", (0, 1, 2), 96
    stripes = [range(i, length, len(group)) for i in group]
    plan = BatchPlan(
        ESPGroup(group),
        tuple(QueryBlock(owner_id, stripe, i, Transfer.KV) for i, stripe in enumerate(stripes)),
        tuple(KVSegment(owner_id, stripe, i) for i, stripe in enumerate(stripes)),
    )
    given = RequestInput(owner_id, [5] * length, length, 0, Placement(), SamplingParams())
    return RunBatch(number, plan, (given,))
