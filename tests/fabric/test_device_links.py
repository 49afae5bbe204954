"""Device links: one that breaks is made again when its ends meet, and all others stay as they are."""

import os
import signal

import pytest
import torch
from gloo_communicators import GlooCommunicator
from socket_worlds import Carrier, run_in_world

from loong.fabric.errors import PeerLostError
from loong.fabric.protocol import Fabric, OpenBatch
from loong.fabric.traffic import Channel
from loong.fabric.world import World

SIZES = (1, 3, 4095, 4096, 4097, 200_003)
NEVER = 600.0  # a deadline no test lives to see


def swap(batch: OpenBatch, instance_id: int, group: tuple[int, ...], size: int = 5) -> None:
    """Exchange a block with every other member."""
    peers = [i for i in group if i != instance_id]
    outgoing = {i: torch.full((size,), 10.0 * instance_id + i) for i in peers}
    incoming = {i: torch.empty(size) for i in peers}
    batch.exchange(outgoing, incoming, Channel.QUERIES).wait()
    assert all((incoming[i] == 10.0 * i + instance_id).all() for i in peers)


def swap_every_size(fabric: Fabric, instance_id: int, tp_rank: int, group: tuple[int, ...]) -> int:
    for batch_id, size in enumerate(SIZES):
        with fabric.batch(batch_id, group) as batch:
            swap(batch, instance_id, group, size)
            swap(batch, instance_id, group, 1)
    return GlooCommunicator.num_made


def test_a_group_on_two_hosts_exchanges_messages_of_every_size_on_links_of_the_start() -> None:
    """Each process has a link for batches and one for migrations to each of two on the other host."""
    made = run_in_world(swap_every_size, World(4, 1), (0, 1, 2, 3), carrier=Carrier.HOSTS_OF_ARENAS)
    assert made == [4] * 4


def lose_one(fabric: Fabric, instance_id: int, tp_rank: int) -> int:
    """Instance 2 dies in a batch with 0; then 0 and 1 go on. Return the communicators made since."""
    with fabric.batch(0, (0, 1, 2)) as batch:
        swap(batch, instance_id, (0, 1, 2))
    num_made = GlooCommunicator.num_made
    if instance_id == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if instance_id == 0:
        with pytest.raises(PeerLostError), fabric.batch(1, (0, 2)) as batch:
            swap(batch, instance_id, (0, 2))
    with fabric.batch(2, (0, 1)) as batch:
        swap(batch, instance_id, (0, 1))
    return GlooCommunicator.num_made - num_made


def test_a_lost_peer_ends_its_own_link_alone() -> None:
    results = run_in_world(
        lose_one, World(3, 1), deadline=NEVER, num_victims=1, carrier=Carrier.HOSTS_OF_ARENAS
    )
    assert results[:2] == [0, 0]


def leave_one_behind(fabric: Fabric, instance_id: int, tp_rank: int) -> list[int]:
    """Instance 0 sends to 1 what it does not receive. Return the communicators made after each batch."""
    counts = []
    for batch_id in range(3):
        with fabric.batch(batch_id, (0, 1)) as batch:
            swap(batch, instance_id, (0, 1))
            if batch_id == 0 and instance_id == 0:
                batch.exchange({1: torch.ones(5)}, {}, Channel.QUERIES)
        counts.append(GlooCommunicator.num_made)
    return counts


def test_a_message_that_nobody_took_ends_with_its_link() -> None:
    results = run_in_world(leave_one_behind, World(2, 1), deadline=NEVER, carrier=Carrier.LINKS)
    assert results == [[2, 3, 3]] * 2
