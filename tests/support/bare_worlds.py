"""Batches on the processes of a small world, without an engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from bare_instance import BareInstance, Outcome, Stop
from capturing_backend import CapturingBackend
from machines import H200_GRAPH_LIMITS
from socket_worlds import run_in_world

from loong.core.instructions import ReleaseKV, RunBatch, ShareKV
from loong.core.placement import InstanceId
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World


def run_commands(
    folder: Path,
    num_instances: int,
    commands: Sequence[RunBatch | ReleaseKV | ShareKV],
    stops: Mapping[InstanceId, Stop] | None = None,
    *,
    takes_leases: bool = False,
    tp_size: int = 1,
    num_slots: int = 256,
) -> list[list[Outcome]]:
    """Return the outcomes of all commands on each process. `stops` are the ends of every lease by instance.

    Tensor-parallel rank 0 receives them in time; the other ranks receive them too late.
    """
    world = World(num_instances, tp_size)
    by_rank = run_in_world(_on_instance, world, folder, commands, stops or {}, takes_leases, num_slots)
    return cast("list[list[Outcome]]", by_rank)


def _on_instance(
    fabric: SocketFabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch | ReleaseKV | ShareKV],
    stops: Mapping[InstanceId, Stop],
    takes_leases: bool,
    num_slots: int,
) -> list[Outcome]:
    backend = CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
    stop = stops.get(instance_id) if tp_rank == 0 else None
    instance = BareInstance(fabric, instance_id, folder, stop, backend, num_slots)
    outcomes = [instance.carry_out(command) for command in commands]
    instance.end_service()
    return outcomes
