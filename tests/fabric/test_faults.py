"""Peers that die, stop, wake up late, leave by an error or come back: always an error, never a hang."""

import os
import signal
from contextlib import closing, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from time import sleep

import pytest
import torch
from processes import Exited, context, run_on_ranks
from socket_worlds import Carrier, MeetingPlace, make_fabric, meeting_place, run_in_world

from loong.fabric.errors import AbandonedError, DeadlineError, PeerLostError
from loong.fabric.protocol import Fabric, OpenBatch, Pending, TensorParallelVerbs, ring_step
from loong.fabric.world import World

NEVER = 600.0  # a deadline no test lives to see
SOON = 1.0
KILLED = Exited(-signal.SIGKILL)


def soon(carrier: Carrier) -> float:
    """Return a short deadline, within which links are made as well: NCCL takes over a second on busy GPUs."""
    return 5.0 if carrier in (Carrier.GPU_LINKS, Carrier.HOSTS_OF_GPUS) else SOON


def finish(pending: Pending) -> None:
    """Wait, and let a device come to its end, which is when it knows of errors."""
    pending.wait()
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
        pending.wait()


def turn(batch: OpenBatch, ranks: TensorParallelVerbs, ring: tuple[int, ...], num_steps: int) -> None:
    held, incoming = torch.zeros(1000), torch.zeros(1000)
    for _ in range(num_steps):
        finish(ring_step(batch, ring, held, incoming))
        ranks.all_reduce(held)


def turn_and_die(batch: OpenBatch, ranks: TensorParallelVerbs, ring: tuple[int, ...], num_steps: int) -> None:
    turn(batch, ranks, ring, num_steps)
    os.kill(os.getpid(), signal.SIGKILL)


def turn_until_one_is_killed(
    fabric: Fabric, instance_id: int, tp_rank: int, victim: tuple[int, int]
) -> tuple[int, int]:
    """Rotate round a ring until it breaks; return the process whose loss was reported here."""
    ring, num_steps = (0, 2, 1), 5 if (instance_id, tp_rank) == victim else 10
    with pytest.raises(PeerLostError) as caught, fabric.batch(0, ring) as batch:
        turn_and_die(batch, fabric.tensor_parallel, ring, num_steps)
    return caught.value.instance_id, caught.value.tp_rank


@pytest.mark.parametrize("victim", [(0, 0), (1, 1), (2, 0)])
def test_a_killed_process_is_an_error_on_every_survivor_long_before_the_deadline(
    victim: tuple[int, int], carrier: Carrier
) -> None:
    world = World(3, 2)
    results = run_in_world(
        turn_until_one_is_killed, world, victim, deadline=NEVER, num_victims=1, carrier=carrier
    )
    rank = world.rank(*victim)
    assert results[rank] == KILLED
    assert results[:rank] + results[rank + 1 :] == [victim] * (world.size - 1)


def own_pid() -> torch.Tensor:
    return torch.tensor([os.getpid()], device="cpu")


def lose_one_that_owes_nothing(
    fabric: Fabric, instance_id: int, tp_rank: int, has_got_all: Event
) -> list[float]:
    """Instance 1 dies when all that it owes has arrived; 0 learns of it in the batch, which ends well."""
    incoming = torch.zeros(2)
    with fabric.batch(0, (0, 1)) as batch:
        finish(ring_step(batch, (0, 1), torch.full((2,), float(instance_id)), incoming))
        if instance_id == 1:
            has_got_all.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        has_got_all.set()
        with pytest.raises(PeerLostError):
            batch.exchange_control((0, 1), own_pid())
    return incoming.tolist()


def test_a_loss_is_no_error_of_a_batch_that_has_got_all_it_is_owed(carrier: Carrier) -> None:
    results = run_in_world(
        lose_one_that_owes_nothing,
        World(2, 1),
        context().Event(),
        deadline=NEVER,
        num_victims=1,
        carrier=carrier,
    )
    assert results == [[1.0, 1.0], KILLED]


def turn_while_one_is_stopped(fabric: Fabric, instance_id: int, tp_rank: int, size: int) -> tuple[int, float]:
    """Instance 1 stops itself; instance 0 turns the ring with blocks of `size`, and ends it in the end."""
    incoming = torch.zeros(size)
    with fabric.batch(0, (0, 1)) as batch:
        pids = batch.exchange_control((0, 1), own_pid())
    if instance_id == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(DeadlineError) as caught, fabric.batch(1, (0, 1)) as batch:
        finish(ring_step(batch, (0, 1), torch.ones(size), incoming))
    os.kill(int(pids[1]), signal.SIGKILL)
    return caught.value.instance_id, caught.value.seconds


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["while receiving", "while sending"])
def test_a_stopped_process_is_an_error_at_the_deadline(size: int, carrier: Carrier) -> None:
    deadline = soon(carrier)
    results = run_in_world(
        turn_while_one_is_stopped, World(2, 1), size, deadline=deadline, num_victims=1, carrier=carrier
    )
    assert results == [(1, deadline), KILLED]


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel names it: T is stopped, S waits."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid: int, state: str) -> None:
    while state_of(pid) != state:
        os.sched_yield()


def pause_a_wait(fabric: Fabric, instance_id: int, tp_rank: int) -> list[float]:
    """Instance 2 stops 1, which owes 0 a message, and then 0, which waits for it, beyond the deadline."""
    incoming, everybody = torch.zeros(1), (0, 1, 2)
    with fabric.batch(0, everybody) as batch:
        pids = {i: int(pid) for i, pid in batch.exchange_control(everybody, own_pid()).items()}
    if instance_id == 2:
        await_state(pids[1], "T")
        os.kill(pids[0], signal.SIGSTOP)
        sleep(1.5 * SOON)  # the pause itself: nothing else is waited for
        os.kill(pids[0], signal.SIGCONT)
        await_state(pids[0], "S")
        os.kill(pids[1], signal.SIGCONT)
        return []
    with fabric.batch(1, (0, 1)) as batch:
        if instance_id == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        finish(ring_step(batch, (0, 1), torch.tensor([float(instance_id)]), incoming))
    return incoming.tolist()


def test_a_pause_of_those_that_wait_counts_for_little_of_their_deadline() -> None:
    """On sockets: a device's clock goes on while the process of the host is stopped."""
    assert run_in_world(pause_a_wait, World(3, 1), deadline=SOON) == [[1.0], [0.0], []]


def wake_late(fabric: Fabric, instance_id: int, tp_rank: int) -> list[float]:
    """Instance 1 sleeps through batch 1, wakes, sends what it owed, and takes part in batch 2."""
    group = (0, 1)
    first, second = torch.zeros(2), torch.zeros(2)
    with fabric.batch(0, group) as batch:
        pids = batch.exchange_control(group, own_pid())
    if instance_id == 0:
        with pytest.raises(DeadlineError), fabric.batch(1, group) as batch:
            finish(ring_step(batch, group, torch.ones(2), first))
        os.kill(int(pids[1]), signal.SIGCONT)
    else:
        with suppress(AbandonedError), fabric.batch(1, group) as batch:
            os.kill(os.getpid(), signal.SIGSTOP)
            finish(ring_step(batch, group, torch.ones(2), first))
    with fabric.batch(2, group) as batch:
        finish(ring_step(batch, group, torch.full((2,), 2.0), second))
    return second.tolist()


def test_what_a_process_sends_after_waking_late_is_not_taken_for_the_next_batch(carrier: Carrier) -> None:
    results = run_in_world(wake_late, World(2, 1), deadline=soon(carrier), carrier=carrier)
    assert results == [[2.0, 2.0], [2.0, 2.0]]


def fail(batch: OpenBatch, ranks: TensorParallelVerbs, ring: tuple[int, ...], num_steps: int) -> None:
    raise ZeroDivisionError


def abandon_one_batch(fabric: Fabric, instance_id: int, tp_rank: int) -> tuple[int, list[float]]:
    """Instance 1 leaves batch 0 by an error; all take part in batch 1. Returns who was said to have left."""
    ring, incoming = (0, 1, 2), torch.zeros(1)
    part, expected = (fail, ZeroDivisionError) if instance_id == 1 else (turn, AbandonedError)
    with pytest.raises(expected) as caught, fabric.batch(0, ring) as batch:
        part(batch, fabric.tensor_parallel, ring, 2)
    with fabric.batch(1, ring) as batch:
        finish(ring_step(batch, ring, torch.tensor([float(instance_id)]), incoming))
    error = caught.value
    return error.instance_id if isinstance(error, AbandonedError) else -1, incoming.tolist()


def test_an_error_in_one_process_ends_the_batch_on_all_and_leaves_the_next_alone(carrier: Carrier) -> None:
    results = run_in_world(abandon_one_batch, World(3, 1), deadline=NEVER, carrier=carrier)
    assert results == [(1, [2.0]), (-1, [0.0]), (1, [1.0])]


def abandon_one_migration(fabric: Fabric, instance_id: int, tp_rank: int) -> float:
    """Instance 1 leaves migration 0 by an error; instance 0 may then neither wait for it nor send more."""
    x = torch.ones(1)
    if instance_id == 1:
        with pytest.raises(ZeroDivisionError), fabric.migration(0, 0):
            raise ZeroDivisionError
        with fabric.migration(1, 0) as migration:
            finish(migration.send(2 * x))
    else:
        with suppress(AbandonedError), fabric.migration(0, 1) as migration:
            for verb in (migration.receive, migration.send):
                with pytest.raises(AbandonedError, match=r"segment of migration 0: instance 1 .* left"):
                    finish(verb(x))
        with fabric.migration(1, 1) as migration:
            finish(migration.receive(x))
    return x.item()


def test_an_error_at_one_end_of_a_migration_ends_it_at_the_other_and_leaves_the_next_alone(
    carrier: Carrier,
) -> None:
    results = run_in_world(abandon_one_migration, World(2, 1), deadline=NEVER, carrier=carrier)
    assert results == [2.0, 1.0]


def die_and_return(rank: int, place: MeetingPlace, is_dead: Event, carrier: Carrier) -> float:
    """Process 0 is rank 0 throughout; 1 is rank 1 and is killed; 2 is rank 1 after its restart."""
    group = (0, 1)
    if rank == 2:
        assert is_dead.wait(30)
    with closing(make_fabric(carrier, place, World(2, 1), min(rank, 1), deadline=30.0)) as fabric:
        fabric.wait_for_peers()
        incoming = torch.zeros(1)
        if rank < 2:
            with fabric.batch(0, group) as batch:
                batch.exchange_control(group, own_pid())
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerLostError), fabric.batch(1, group) as batch:
                finish(ring_step(batch, group, torch.zeros(1), incoming))
            is_dead.set()
            fabric.wait_for_peers()
        with fabric.batch(2, group) as batch:
            finish(ring_step(batch, group, torch.tensor([float(rank)]), incoming))
    return incoming.item()


def test_a_restarted_process_joins_again_and_the_others_keep_their_connections(carrier: Carrier) -> None:
    with meeting_place() as place:
        results = run_on_ranks(die_and_return, 3, place, context().Event(), carrier)
    assert results == [2.0, KILLED, 0.0]
