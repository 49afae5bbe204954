"""Runs a function in every process of a small world, each with its end of the data plane."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from processes import context, load, run_on_ranks

from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.world import World

ADDRESSES = ("127.0.0.2", "127.0.0.3")  # of the two hosts
SECRET = "a secret of tests"
SPARE_BYTES = 16 << 20  # of an arena, for tests


class Carrier(Enum):
    """The carrier of messages. Tensors that a process makes are on the device that they travel from."""

    SOCKETS = "sockets"
    HOSTS = "sockets of two hosts"  # by turns, instance 0 on the first
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
    with meeting_place() as place:
        return run_on_ranks(
            _call_in_world,
            world.size,
            place,
            world,
            deadline,
            everyone_returned,
            path,
            name,
            args,
            carrier,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A folder for the sockets of one host or each of two, and the endpoint of the directory of peers."""

    directory: Path
    peers: str


@contextmanager
def meeting_place() -> Iterator[MeetingPlace]:
    """A place where processes find each other."""
    with (
        tempfile.TemporaryDirectory(prefix="loong-") as name,
        closing(PeerDirectory(ADDRESSES[0], SECRET)) as peers,
    ):
        for host_id in range(len(ADDRESSES)):
            (Path(name) / f"host-{host_id}").mkdir()
        yield MeetingPlace(Path(name), peers.endpoint)


def fabric_of_host(place: MeetingPlace, world: World, rank: int, deadline: float) -> SocketFabric:
    """Return the end of a process of a world over two hosts."""
    host_ids = tuple(i % len(ADDRESSES) for i in range(world.num_instances))
    host_id = host_ids[world.instance_id(rank)]
    network = Network(host_ids, ADDRESSES[host_id], place.peers, SECRET)
    folder = place.directory / f"host-{host_id}"
    return SocketFabric(folder, world, rank, deadline=deadline, network=network)


def make_fabric(carrier: Carrier, place: MeetingPlace, world: World, rank: int, deadline: float) -> Fabric:
    """Return one process's end. On GPUs, processes take those of the host in turn."""
    if carrier is Carrier.HOSTS:
        return fabric_of_host(place, world, rank, deadline)
    sockets = SocketFabric(place.directory, world, rank, deadline=deadline)
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
    place: MeetingPlace,
    world: World,
    deadline: float,
    everyone_returned: Barrier,
    path: str,
    name: str,
    args: tuple[object, ...],
    carrier: Carrier,
) -> object:
    torch.set_num_threads(1)
    with closing(make_fabric(carrier, place, world, rank, deadline)) as fabric:
        fabric.wait_for_peers()
        result: object = getattr(load(path), name)(
            fabric, world.instance_id(rank), world.tp_rank(rank), *args
        )
        everyone_returned.wait(timeout=30)
    return result
