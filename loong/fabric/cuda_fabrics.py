"""The choice of the fabric between the GPUs of a world, once at start."""

import logging
from collections.abc import Collection
from functools import partial

import torch
import torch.distributed as dist

from loong.core.errors import ConfigError
from loong.fabric.device_links.device_links import DeviceLinks
from loong.fabric.device_links.linked_fabric import LinkedFabric
from loong.fabric.memory.cuda_copy_streams import CudaCopyStream
from loong.fabric.memory.cuda_memory import CudaMemory
from loong.fabric.memory.symmetric_fabric import SymmetricFabric
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.staged_fabric import StagedFabric

logger = logging.getLogger(__name__)


def connect_gpus(kind: str, sockets: SocketFabric, index: int, spare_bytes: int) -> Fabric:
    """Return a fabric for tensors on GPU `index`, of the given kind or (auto) the best available.

    With `symmetric` and `nccl`, tensors travel between hosts by NCCL. Raises ConfigError if the GPUs do not
    support that kind.
    """
    world, rank = sockets.world, sockets.rank
    peers = [other for other in range(world.size) if other != rank and world.exchange_tensors(rank, other)]
    far = [other for other in peers if not world.share_host(rank, other)]
    if kind == "auto":
        kind = _best_kind(index, world.num_on_host(rank), has_hosts=bool(far))
        logger.info("GPU %d: tensors travel by the %s fabric", index, kind)
    match kind:
        case "symmetric":
            near = SymmetricFabric(sockets, CudaMemory(index), CudaCopyStream, spare_bytes=spare_bytes)
            return _linked(sockets, near, far, index) if far else near
        case "nccl":
            if world.num_on_host(rank) > torch.cuda.device_count():
                raise ConfigError(
                    f"NCCL needs a GPU for each of {world.num_on_host(rank)} processes of this host, "
                    f"but there are {torch.cuda.device_count()}"
                )
            return _linked(sockets, StagedFabric(sockets), peers, index)
        case "staged":
            return StagedFabric(sockets)
        case _:
            raise ConfigError(f"there is no fabric {kind!r}")


def _linked(sockets: SocketFabric, near: Fabric, peers: Collection[int], index: int) -> Fabric:
    if not dist.is_nccl_available():
        raise ConfigError(
            f"torch {torch.__version__} has no NCCL, which tensors travel by; --fabric staged needs none"
        )
    from loong.fabric.device_links.nccl import NcclCommunicator, set_environment

    set_environment(sockets.address)
    device = torch.device("cuda", index)
    return LinkedFabric(sockets, near, DeviceLinks(sockets, peers, partial(NcclCommunicator, device)), device)


def _best_kind(index: int, num_on_host: int, *, has_hosts: bool) -> str:
    """Return the best kind for a GPU, by whether it can access the memory of all others of the host."""
    others = set(range(min(num_on_host, torch.cuda.device_count()))) - {index}
    if all(torch.cuda.can_device_access_peer(index, other) for other in others):
        return "symmetric"
    return "nccl" if has_hosts else "staged"
