"""Runs a function in every process of a small world, each with its end of the data plane."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from processes import context, load, run_on_ranks

from loong.fabric.sockets import SocketFabric
from loong.fabric.world import World


def run_in_world(
    function: Callable[..., object], world: World, *args: object, deadline: float = 20.0, num_victims: int = 0
) -> list[object]:
    """Call `function(fabric, instance_id, tp_rank, *args)` in each process; returns what each gave, by rank.

    Nobody leaves the world before all have returned but the `num_victims` that are to die or to stay stopped.
    """
    everyone_returned = context().Barrier(world.size - num_victims)
    path, name = function.__code__.co_filename, function.__name__
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        return run_on_ranks(
            _call_in_world, world.size, Path(directory), world, deadline, everyone_returned, path, name, args
        )


def _call_in_world(
    rank: int,
    directory: Path,
    world: World,
    deadline: float,
    everyone_returned: Barrier,
    path: str,
    name: str,
    args: tuple[object, ...],
) -> object:
    torch.set_num_threads(1)
    with closing(SocketFabric(directory, world, rank, deadline=deadline)) as fabric:
        fabric.wait_for_peers()
        result: object = getattr(load(path), name)(
            fabric, world.instance_id(rank), world.tp_rank(rank), *args
        )
        everyone_returned.wait(timeout=30)
    return result
