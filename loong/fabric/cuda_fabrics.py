"""The choice of the fabric between the GPUs of a world, once at start."""

import logging

import torch

from loong.core.errors import ConfigError
from loong.fabric.collective import CollectiveFabric
from loong.fabric.memory.cuda_copy_streams import CudaCopyStream
from loong.fabric.memory.cuda_memory import CudaMemory
from loong.fabric.memory.symmetric import SymmetricFabric
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Fabric
from loong.fabric.staged import StagedFabric

logger = logging.getLogger(__name__)


def connect_gpus(kind: str, sockets: SocketFabric, index: int, spare_bytes: int) -> Fabric:
    """Return a fabric for tensors on GPU `index`, of the given kind or (auto) the best available.

    Raises ConfigError if the GPUs do not support that kind.
    """
    if kind == "auto":
        kind = "symmetric" if _are_peers(index, sockets.world.size) else "staged"
        logger.info("GPU %d: tensors travel by the %s fabric", index, kind)
    match kind:
        case "symmetric":
            return SymmetricFabric(sockets, CudaMemory(index), CudaCopyStream, spare_bytes=spare_bytes)
        case "nccl":
            if sockets.world.size > torch.cuda.device_count():
                raise ConfigError(
                    f"NCCL needs a GPU for each of {sockets.world.size} processes, "
                    f"but there are {torch.cuda.device_count()}"
                )
            return CollectiveFabric(sockets, torch.device("cuda", index))
        case "staged":
            return StagedFabric(sockets)
        case _:
            raise ConfigError(f"there is no fabric {kind!r}")


def _are_peers(index: int, num_ranks: int) -> bool:
    """Return whether a GPU can access the memory of all GPUs that the ranks of a world use."""
    others = set(range(min(num_ranks, torch.cuda.device_count()))) - {index}
    return all(torch.cuda.can_device_access_peer(index, other) for other in others)
