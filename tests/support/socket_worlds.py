"""Runs a function in every process of a small world, each with its end of the data plane."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import pytest
import torch
from processes import context, load, run_on_ranks

from loong.fabric.device_links.device_links import DeviceLinks
from loong.fabric.device_links.linked_fabric import LinkedFabric
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.staged_fabric import StagedFabric
from loong.fabric.world import World

if TYPE_CHECKING:  # slow to import
    from loong.fabric.memory.copy_streams import CopyStreamMaker
    from loong.fabric.memory.shared_memory import SharedMemory

ADDRESSES = ("127.0.0.2", "127.0.0.3")  # of the two hosts
SECRET = "a secret of tests"
SPARE_BYTES = 16 << 20  # of an arena, for tests


class Carrier(Enum):
    """The carrier of messages. Tensors that a process makes are on the device that they travel from."""

    SOCKETS = "sockets"
    HOSTS = "sockets of two hosts"  # by turns, instance 0 on the first
    ARENAS = "arenas"  # of memory of the host
    GPU_ARENAS = "arenas on GPUs"
    LINKS = "device links"
    HOSTS_OF_ARENAS = "arenas of two hosts, and device links between them"
    GPU_LINKS = "device links of GPUs"
    HOSTS_OF_GPUS = "GPUs of two hosts"


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
    that are to die or to stay stopped. A world of linked GPUs needs one for each process.
    """
    is_linked = carrier in (Carrier.GPU_LINKS, Carrier.HOSTS_OF_GPUS)
    if is_linked and world.size > torch.cuda.device_count():
        pytest.skip(f"NCCL needs a GPU for each of {world.size} processes")
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


def sockets_of_host(place: MeetingPlace, world: World, rank: int, deadline: float) -> SocketFabric:
    """Return the end of a process of a world over two hosts, which have the instances in turn."""
    host_ids = tuple(i % len(ADDRESSES) for i in range(world.num_instances))
    world, host_id = replace(world, host_ids=host_ids), host_ids[world.instance_id(rank)]
    network = Network(ADDRESSES[host_id], place.peers, SECRET)
    folder = place.directory / f"host-{host_id}"
    return SocketFabric(folder, world, rank, deadline=deadline, network=network)


def make_fabric(carrier: Carrier, place: MeetingPlace, world: World, rank: int, deadline: float) -> Fabric:
    """Return one process's end. On GPUs, processes take those of the host in turn."""
    has_hosts = carrier in (Carrier.HOSTS, Carrier.HOSTS_OF_ARENAS, Carrier.HOSTS_OF_GPUS)
    if has_hosts:
        sockets = sockets_of_host(place, world, rank, deadline)
    else:
        sockets = SocketFabric(place.directory, world, rank, deadline=deadline)
    match carrier:
        case Carrier.SOCKETS | Carrier.HOSTS:
            return sockets
        case Carrier.ARENAS:
            return _arenas(sockets)
        case Carrier.GPU_ARENAS:
            return _gpu_arenas(sockets)
        case Carrier.LINKS:
            return _linked(sockets, sockets, _others(sockets))
        case Carrier.HOSTS_OF_ARENAS:
            return _linked(sockets, _arenas(sockets), _others_elsewhere(sockets))
        case Carrier.GPU_LINKS:
            return _linked_gpus(sockets, StagedFabric(sockets), _others(sockets))
        case Carrier.HOSTS_OF_GPUS:
            return _linked_gpus(sockets, _gpu_arenas(sockets), _others_elsewhere(sockets))
        case _:
            assert_never(carrier)


def _arenas(sockets: SocketFabric) -> Fabric:
    from host_arenas import HostMemory, ThreadCopyStream  # not at the top: these are slow to import

    return _symmetric(sockets, HostMemory(), ThreadCopyStream)


def _gpu_arenas(sockets: SocketFabric) -> Fabric:
    from loong.fabric.memory.cuda_copy_streams import CudaCopyStream
    from loong.fabric.memory.cuda_memory import CudaMemory

    index = sockets.rank % torch.cuda.device_count()
    torch.set_default_device(f"cuda:{index}")
    return _symmetric(sockets, CudaMemory(index), CudaCopyStream)


def _symmetric(sockets: SocketFabric, memory: "SharedMemory", make_copy_stream: "CopyStreamMaker") -> Fabric:
    from loong.fabric.memory.chunked_channel import ChunkedChannelSize
    from loong.fabric.memory.symmetric_fabric import SIZES, SymmetricFabric

    return SymmetricFabric(
        sockets,
        memory,
        make_copy_stream,
        sizes=dict.fromkeys(SIZES, ChunkedChannelSize(2, 4096)),
        shard_bytes=4096,
        spare_bytes=SPARE_BYTES,
    )


def _others(sockets: SocketFabric) -> list[int]:
    """Return the peers that a process exchanges tensors with."""
    world, rank = sockets.world, sockets.rank
    return [peer for peer in range(world.size) if peer != rank and world.exchange_tensors(peer, rank)]


def _others_elsewhere(sockets: SocketFabric) -> list[int]:
    return [peer for peer in _others(sockets) if not sockets.world.share_host(peer, sockets.rank)]


def _linked(sockets: SocketFabric, near: Fabric, peers: list[int]) -> Fabric:
    from gloo_communicators import GlooCommunicator

    links = DeviceLinks(sockets, peers, GlooCommunicator)
    return LinkedFabric(sockets, near, links, torch.device("cpu"))


def _linked_gpus(sockets: SocketFabric, near: Fabric, peers: list[int]) -> Fabric:
    from loong.fabric.device_links.nccl import NcclCommunicator, set_environment

    device = torch.device("cuda", sockets.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    set_environment(ADDRESSES[0])
    os.environ["NCCL_HOSTID"] = f"host of rank {sockets.rank}"  # so that it uses sockets, as between hosts
    links = DeviceLinks(sockets, peers, partial(NcclCommunicator, device))
    return LinkedFabric(sockets, near, links, device)


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
