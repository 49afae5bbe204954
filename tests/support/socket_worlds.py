"""Runs a function in every process of a small world, each with its end of the data plane."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from processes import context, load, run_on_ranks

from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.world import World

SPARE_BYTES = 16 << 20  # of an arena, for tests


class Carrier(Enum):
    """The carrier of messages. Tensors that a process makes are on the device that they travel from."""

    SOCKETS = "sockets"
    ARENAS = "arenas"  # of memory of the host
    GPU_ARENAS = "arenas on GPUs"


def run_in_world(
    function: Callable[..., object],
    world: World,
    *args: object,
    deadline: float = 20.0,
    num_victims: int = 0,
    carrier: Carrier = Carrier.SOCKETS,
    seconds: float = 150.0,
) -> list[object]:
    """Call `function(fabric, instance_id, tp_rank, *args)` in each process; return results by rank.

    They have a time limit. No process leaves the world before all have returned, except the `num_victims`
    that are to die or to stay stopped.
    """
    everyone_returned = context().Barrier(world.size - num_victims)
    path, name = function.__code__.co_filename, function.__name__
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        return run_on_ranks(
            _call_in_world,
            world.size,
            Path(directory),
            world,
            deadline,
            everyone_returned,
            path,
            name,
            args,
            carrier,
            seconds=seconds,
        )


def make_fabric(carrier: Carrier, directory: Path, world: World, rank: int, deadline: float) -> Fabric:
    """Return one process's end. On GPUs, processes take those of the host in turn."""
    sockets = SocketFabric(directory, world, rank, deadline=deadline)
    if carrier is Carrier.SOCKETS:
        return sockets
    from host_arenas import HostMemory, ThreadCopyStream  # not at the top: these are slow to import

    from loong.fabric.memory.chunked_channel import ChunkedChannelSize
    from loong.fabric.memory.symmetric import SIZES, SymmetricFabric

    make = partial(
        SymmetricFabric,
        sockets,
        sizes=dict.fromkeys(SIZES, ChunkedChannelSize(2, 4096)),
        shard_bytes=4096,
        spare_bytes=SPARE_BYTES,
    )
    if carrier is Carrier.ARENAS:
        return make(HostMemory(), ThreadCopyStream)
    from loong.fabric.memory.cuda_copy_streams import CudaCopyStream
    from loong.fabric.memory.cuda_memory import CudaMemory

    index = rank % torch.cuda.device_count()
    torch.set_default_device(f"cuda:{index}")
    return make(CudaMemory(index), CudaCopyStream)


def _call_in_world(
    rank: int,
    directory: Path,
    world: World,
    deadline: float,
    everyone_returned: Barrier,
    path: str,
    name: str,
    args: tuple[object, ...],
    carrier: Carrier,
) -> object:
    torch.set_num_threads(1)
    with closing(make_fabric(carrier, directory, world, rank, deadline)) as fabric:
        fabric.wait_for_peers()
        result: object = getattr(load(path), name)(
            fabric, world.instance_id(rank), world.tp_rank(rank), *args
        )
        everyone_returned.wait(timeout=30)
    return result
