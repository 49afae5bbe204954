"""Messages with a receiver, by communicators: gloo's here, NCCL's between GPUs."""

import os
import signal
import tempfile
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Thread

import pytest
import torch
from processes import Exited, context, run_on_ranks

from loong.core.errors import ClusterError
from loong.fabric.collective import CollectiveFabric
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.traffic import Channel, Sent
from loong.fabric.world import World

BACKENDS = ("gloo", pytest.param("nccl", marks=pytest.mark.multigpu))
SOON = 2.0
KILLED = Exited(-signal.SIGKILL)


def make_fabric(backend: str, directory: Path, world: World, rank: int, deadline: float) -> CollectiveFabric:
    """Return one process's end; on GPUs, its tensors are there."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    fabric = CollectiveFabric(SocketFabric(directory, world, rank, deadline=deadline), device, backend)
    fabric.wait_for_peers()
    return fabric


def use_every_verb(
    rank: int, directory: Path, backend: str, everyone_returned: Barrier
) -> tuple[list[list[float]], Sent]:
    """Return the results of each verb in a world of two instances, with a segment of 4 MB from 0 to 1."""
    with closing(make_fabric(backend, directory, World(2, 1), rank, 20.0)) as fabric:
        segment = torch.full((1 << 20,), 5.0 + rank)

        def migrate() -> None:
            torch.set_default_device(segment.device)
            with fabric.migration(3, 1 - rank):
                (fabric.send_segment if rank == 0 else fabric.receive_segment)(segment).wait()

        migration = Thread(target=migrate)
        migration.start()
        ring, held = [], torch.full((rank + 1,), float(rank))
        with fabric.batch(0, (0, 1)):
            for owner in (1 - rank, rank):
                incoming = torch.empty(owner + 1)
                fabric.ring_step((0, 1), held, incoming).wait()
                held = incoming
                ring.append(held.sum().item())
            queries, partials = torch.empty(2), torch.empty(0)
            outgoing = {1 - rank: torch.full((2,), 10.0 + rank)}
            fabric.exchange(outgoing, {1 - rank: queries}, Channel.QUERIES).wait()
            fabric.exchange({1 - rank: partials}, {}, Channel.PARTIALS).wait()
        migration.join()
        everyone_returned.wait(timeout=30)
        sent = fabric.traffic.snapshot()[Channel.RING]
    return [ring, queries.tolist(), segment[-1:].tolist()], sent


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_verb_moves_what_it_is_given(backend: str) -> None:
    barrier = context().Barrier(2)
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        results = run_on_ranks(use_every_verb, 2, Path(directory), backend, barrier)
    assert results == [
        ([[2.0, 0.0], [11.0, 11.0], [5.0]], Sent(2, 12)),
        ([[0.0, 2.0], [10.0, 10.0], [5.0]], Sent(2, 12)),
    ]


def reduce_and_gather(
    rank: int, directory: Path, backend: str, everyone_returned: Barrier
) -> tuple[list[float], list[float]]:
    with closing(make_fabric(backend, directory, World(1, 2), rank, 20.0)) as fabric:
        x = torch.tensor([rank + 0.5, 2.0])
        with fabric.batch(0, (0,)):
            total = fabric.tensor_parallel.all_reduce(x).tolist()
            gathered = fabric.tensor_parallel.all_gather(x).tolist()
        everyone_returned.wait(timeout=30)
    return total, gathered


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_of_an_instance_sum_and_gather(backend: str) -> None:
    barrier = context().Barrier(2)
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        results = run_on_ranks(reduce_and_gather, 2, Path(directory), backend, barrier)
    assert results == [([2.0, 4.0], [0.5, 2.0, 1.5, 2.0])] * 2


def turn(fabric: CollectiveFabric) -> None:
    fabric.ring_step((0, 1), torch.zeros(1000), torch.zeros(1000)).wait()
    torch.cuda.synchronize()
    fabric.check()


def turn_until_one_is_gone(rank: int, directory: Path, how: signal.Signals) -> str:
    """Kill or stop process 1; return the error that ends process 0."""
    fabric = make_fabric("nccl", directory, World(2, 1), rank, SOON)
    with fabric.batch(0, (0, 1)):
        pid = torch.tensor([os.getpid()], device="cpu")
        victim = int(fabric.exchange_control((0, 1), pid)[1])
    if rank == 1:
        os.kill(os.getpid(), how)
    with pytest.raises(ClusterError) as caught, fabric.batch(1, (0, 1)):
        turn(fabric)
    os.kill(victim, signal.SIGKILL)
    return str(caught.value)


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("how", "what"), [(signal.SIGKILL, "instance 1"), (signal.SIGSTOP, "silent for 2 s")]
)
def test_a_process_that_is_killed_or_stopped_is_an_error(how: signal.Signals, what: str) -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        reported, gone = run_on_ranks(turn_until_one_is_gone, 2, Path(directory), how)
    assert isinstance(reported, str)
    assert what in reported
    assert gone == KILLED
