"""Tensors of another device than the host's travel whole. Here that device is the host too."""

import torch
from socket_worlds import run_in_world

from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import ring_step
from loong.fabric.staged_fabric import StagedFabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World


def use_every_verb(sockets: SocketFabric, instance_id: int, tp_rank: int) -> list[list[float]]:
    fabric, peer_id = StagedFabric(sockets), 1 - instance_id
    own = torch.full((2,), float(instance_id))
    with fabric.batch(1, (0, 1)) as batch:
        round_the_ring, exchanged = torch.full((2,), torch.nan), torch.full((2,), torch.nan)
        ring_step(batch, (0, 1), own, round_the_ring).wait()
        batch.exchange({peer_id: own + 10}, {peer_id: exchanged}, Channel.QUERIES).wait()
        reported = batch.exchange_control((0, 1), torch.tensor([instance_id]))
    segment = torch.full((2,), 20.0 + instance_id)
    with fabric.migration(1, peer_id) as migration:
        if instance_id == 0:
            migration.send(segment).wait()
        else:
            migration.receive(segment).wait()
    assert fabric.traffic.snapshot() == sockets.traffic.snapshot()
    found = [round_the_ring, exchanged, torch.cat([reported[0], reported[1]]), segment]
    return [tensor.tolist() for tensor in found]


def test_every_verb_moves_what_the_fabric_below_moves() -> None:
    assert run_in_world(use_every_verb, World(2, 1)) == [
        [[1.0, 1.0], [11.0, 11.0], [0, 1], [20.0, 20.0]],
        [[0.0, 0.0], [10.0, 10.0], [0, 1], [20.0, 20.0]],
    ]
