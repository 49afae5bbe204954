"""Batches on the processes of a small world, without an engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from bare_instance import BareInstance, Outcome, Stop
from socket_worlds import run_in_world

from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.placement import InstanceId
from loong.fabric.sockets import SocketFabric
from loong.fabric.world import World
from loong.worker.backend import CpuBackend


def run_commands(
    folder: Path,
    num_instances: int,
    commands: Sequence[RunBatch | ReleaseKV],
    stops: Mapping[InstanceId, Stop] | None = None,
    *,
    takes_leases: bool = False,
) -> list[list[Outcome]]:
    """The outcomes of all commands on each instance. `stops` is what instances are told of every lease."""
    by_rank = run_in_world(_on_instance, World(num_instances, 1), folder, commands, stops or {}, takes_leases)
    return cast("list[list[Outcome]]", by_rank)


def _on_instance(
    fabric: SocketFabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch | ReleaseKV],
    stops: Mapping[InstanceId, Stop],
    takes_leases: bool,
) -> list[Outcome]:
    backend = CpuBackend(takes_leases=takes_leases)
    instance = BareInstance(fabric, instance_id, folder, stops.get(instance_id), backend)
    return [instance.carry_out(command) for command in commands]
