"""Commands on instances whose captured steps exchange by the kernels of GPUs, interpreted or on GPUs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from bare_instance import BareInstance, Outcome, WeightlessInstance
from machines import H200_GRAPH_LIMITS
from mailbox_backend import MailboxBackend
from socket_worlds import Carrier, run_in_world

from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.instructions import ReleaseKV, RunBatch, ShareKV
from loong.core.placement import InstanceId
from loong.fabric.protocol import Fabric
from loong.fabric.world import World
from loong.worker.backend import Backend


def run_by_mailboxes(
    folder: Path,
    num_instances: int,
    commands: Sequence[RunBatch | ReleaseKV | ShareKV],
    carrier: Carrier = Carrier.ARENAS,
    graph_limits: CudaGraphLimits = H200_GRAPH_LIMITS,
    tp_size: int = 1,
    weightless_ids: tuple[InstanceId, ...] = (),
) -> list[list[Outcome]]:
    """Return the outcomes of all commands on each instance, on processors."""
    world, make_backend = World(num_instances, tp_size), partial(_interpreted, graph_limits)
    given = commands, make_backend, 256, weightless_ids
    ran = run_in_world(_run, world, folder, *given, carrier=carrier)
    return cast("list[list[Outcome]]", ran)[::tp_size]


def run_on_gpus(
    folder: Path,
    num_instances: int,
    commands: Sequence[RunBatch | ReleaseKV | ShareKV],
    num_slots: int = 256,
    tp_size: int = 1,
) -> list[list[Outcome]]:
    """Return the outcomes of all commands on each instance."""
    world, carrier = World(num_instances, tp_size), Carrier.GPU_ARENAS
    if world.size > torch.cuda.device_count():
        pytest.skip(f"each of {world.size} processes needs a GPU")
    ran = run_in_world(_run, world, folder, commands, _on_gpu, num_slots, carrier=carrier, seconds=150.0)
    return cast("list[list[Outcome]]", ran)[::tp_size]


def _interpreted(graph_limits: CudaGraphLimits) -> Backend:
    return MailboxBackend(graph_limits)


def _on_gpu() -> Backend:
    from loong.worker.cuda_backend import CudaBackend  # not at the top: it needs Triton for GPUs

    index = torch.get_default_device().index  # of this process's fabric
    torch.set_default_device("cpu")
    backend = CudaBackend(index, torch.float32, graph_limits=H200_GRAPH_LIMITS)
    backend.warm_up_lengths = ()
    return backend


def _run(
    fabric: Fabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch | ReleaseKV | ShareKV],
    make_backend: Callable[[], Backend],
    num_slots: int,
    weightless_ids: tuple[InstanceId, ...] = (),
) -> list[Outcome]:
    instance: BareInstance | WeightlessInstance
    if instance_id in weightless_ids:
        instance = WeightlessInstance(fabric, instance_id, folder, make_backend(), num_slots)
    else:
        instance = BareInstance(fabric, instance_id, folder, None, make_backend(), num_slots)
        instance.poison()
    outcomes = [instance.carry_out(command) for command in commands]
    instance.end_service()
    return outcomes
