"""Peers that die, stop, wake up late, leave by an error or come back: always an error, never a hang."""

import os
import signal
import tempfile
import threading
from contextlib import closing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from processes import Exited, context, run_on_ranks
from socket_worlds import run_in_world

from loong.fabric.errors import AbandonedError, DeadlineError, InvalidMessageError, PeerLostError
from loong.fabric.sockets import SocketFabric
from loong.fabric.world import World

NEVER = 600.0  # a deadline no test lives to see
SOON = 2.0
KILLED = Exited(-signal.SIGKILL)


def turn(fabric: SocketFabric, ring: tuple[int, ...], num_steps: int) -> None:
    held, incoming = torch.zeros(1000), torch.zeros(1000)
    for _ in range(num_steps):
        fabric.ring_step(ring, held, incoming).wait()
        fabric.tensor_parallel.all_reduce(held)


def turn_until_one_is_killed(
    fabric: SocketFabric, instance_id: int, tp_rank: int, victim: tuple[int, int]
) -> tuple[int, int]:
    """Rotate round a ring until it breaks; returns whose loss this process was told."""
    ring = (0, 2, 1)
    with fabric.batch(0, ring):
        turn(fabric, ring, 25)
        if (instance_id, tp_rank) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            turn(fabric, ring, 25)
    return caught.value.instance_id, caught.value.tp_rank


@pytest.mark.parametrize("victim", [(0, 0), (1, 1), (2, 0)])
def test_a_killed_process_is_an_error_on_every_survivor_long_before_the_deadline(
    victim: tuple[int, int],
) -> None:
    world = World(3, 2)
    results = run_in_world(turn_until_one_is_killed, world, victim, deadline=NEVER, num_victims=1)
    rank = world.rank(*victim)
    assert results[rank] == KILLED
    assert results[:rank] + results[rank + 1 :] == [victim] * (world.size - 1)


def turn_while_one_is_stopped(
    fabric: SocketFabric, instance_id: int, tp_rank: int, size: int
) -> tuple[int, float]:
    """Instance 1 stops itself; instance 0 turns the ring with blocks of `size`, and ends it in the end."""
    incoming = torch.zeros(size)
    with fabric.batch(0, (0, 1)):
        pids = fabric.exchange_control((0, 1), torch.tensor([os.getpid()]))
    if instance_id == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(DeadlineError) as caught, fabric.batch(1, (0, 1)):
        fabric.ring_step((0, 1), torch.ones(size), incoming).wait()
    os.kill(int(pids[1]), signal.SIGKILL)
    return caught.value.instance_id, caught.value.seconds


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["while receiving", "while sending"])
def test_a_stopped_process_is_an_error_at_the_deadline(size: int) -> None:
    results = run_in_world(turn_while_one_is_stopped, World(2, 1), size, deadline=SOON, num_victims=1)
    assert results == [(1, SOON), KILLED]


def wake_late(fabric: SocketFabric, instance_id: int, tp_rank: int) -> tuple[list[float], list[float]]:
    """Instance 1 sleeps through batch 1, wakes, sends what it owed, and takes part in batch 2."""
    group = (0, 1)
    first, second = torch.zeros(2), torch.zeros(2)
    with fabric.batch(0, group):
        pids = fabric.exchange_control(group, torch.tensor([os.getpid()]))
    if instance_id == 0:
        with pytest.raises(DeadlineError), fabric.batch(1, group):
            fabric.ring_step(group, torch.ones(2), first).wait()
        os.kill(int(pids[1]), signal.SIGCONT)
    else:
        with fabric.batch(1, group):
            os.kill(os.getpid(), signal.SIGSTOP)
            fabric.ring_step(group, torch.ones(2), first).wait()
    with fabric.batch(2, group):
        fabric.ring_step(group, torch.full((2,), 2.0), second).wait()
    return first.tolist(), second.tolist()


def test_what_a_process_sends_after_waking_late_is_not_taken_for_the_next_batch() -> None:
    results = run_in_world(wake_late, World(2, 1), deadline=SOON)
    assert results == [([0.0, 0.0], [2.0, 2.0]), ([1.0, 1.0], [2.0, 2.0])]


def fail(fabric: SocketFabric, ring: tuple[int, ...], num_steps: int) -> None:
    raise ZeroDivisionError


def abandon_one_batch(fabric: SocketFabric, instance_id: int, tp_rank: int) -> tuple[int, list[float]]:
    """Instance 1 leaves batch 0 by an error; all take part in batch 1. Returns who was said to have left."""
    ring, incoming = (0, 1, 2), torch.zeros(1)
    part, expected = (fail, ZeroDivisionError) if instance_id == 1 else (turn, AbandonedError)
    with pytest.raises(expected) as caught, fabric.batch(0, ring):
        part(fabric, ring, 2)
    with fabric.batch(1, ring):
        fabric.ring_step(ring, torch.tensor([float(instance_id)]), incoming).wait()
    error = caught.value
    return error.instance_id if isinstance(error, AbandonedError) else -1, incoming.tolist()


def test_an_error_in_one_process_ends_the_batch_on_all_and_leaves_the_next_alone() -> None:
    results = run_in_world(abandon_one_batch, World(3, 1), deadline=NEVER)
    assert results == [(1, [2.0]), (-1, [0.0]), (1, [1.0])]


def abandon_one_migration(fabric: SocketFabric, instance_id: int, tp_rank: int) -> float:
    """Instance 1 leaves migration 0 by an error; instance 0 may then neither wait for it nor send more."""
    x = torch.ones(1)
    if instance_id == 1:
        with pytest.raises(ZeroDivisionError), fabric.migration(0, 0):
            raise ZeroDivisionError
        with fabric.migration(1, 0):
            fabric.send_segment(2 * x).wait()
    else:
        with fabric.migration(0, 1):
            for verb in (fabric.receive_segment, fabric.send_segment):
                with pytest.raises(AbandonedError, match=r"segment of migration 0: instance 1 .* left"):
                    verb(x).wait()
        with fabric.migration(1, 1):
            fabric.receive_segment(x).wait()
    return x.item()


def test_an_error_at_one_end_of_a_migration_ends_it_at_the_other_and_leaves_the_next_alone() -> None:
    assert run_in_world(abandon_one_migration, World(2, 1), deadline=NEVER) == [2.0, 1.0]


def die_and_return(rank: int, directory: Path, is_dead: Event) -> float:
    """Process 0 is rank 0 throughout; 1 is rank 1 and is killed; 2 is rank 1 after its restart."""
    group, incoming = (0, 1), torch.zeros(1)
    if rank == 2:
        assert is_dead.wait(30)
    with closing(SocketFabric(directory, World(2, 1), min(rank, 1), deadline=30.0)) as fabric:
        fabric.wait_for_peers()
        if rank < 2:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerLostError), fabric.batch(0, group):
                fabric.ring_step(group, torch.zeros(1), incoming).wait()
            is_dead.set()
            fabric.wait_for_peers()
        with fabric.batch(1, group):
            fabric.ring_step(group, torch.tensor([float(rank)]), incoming).wait()
    return incoming.item()


def test_a_restarted_process_joins_again_and_the_others_keep_their_connections() -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        assert run_on_ranks(die_and_return, 3, Path(directory), context().Event()) == [2.0, KILLED, 0.0]


def count_what_is_held() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def come_and_go(rank: int, directory: Path) -> bool:
    before = count_what_is_held()
    with closing(SocketFabric(directory, World(2, 1), rank, deadline=30.0)) as fabric:
        fabric.wait_for_peers()
        with fabric.batch(0, (0, 1)):
            fabric.exchange_control((0, 1), torch.zeros(1, dtype=torch.int64))
    return count_what_is_held() == before


def test_closing_leaves_no_thread_no_descriptor_and_no_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        assert run_on_ranks(come_and_go, 2, Path(directory)) == [True, True]
        assert [path.suffix for path in Path(directory).iterdir()] == [".lock"]


def test_a_world_that_stays_incomplete_names_who_is_missing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        fabric = SocketFabric(Path(directory), World(2, 2), 0, deadline=0.01)
        with closing(fabric), pytest.raises(DeadlineError, match=r"instance 0 \(tensor-parallel rank 1\)"):
            fabric.wait_for_peers()


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    with pytest.raises(InvalidMessageError, match="longer than the 107 bytes"):
        SocketFabric(directory, World(1, 1), 0, deadline=1.0)
