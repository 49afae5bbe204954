"""Memory of a GPU that other processes of the host can write to, on the same GPU or its peers.

It uses the driver's virtual memory with file descriptors. Physical memory lives as long as any process has it
mapped, so a process may die while others write to it. Mapping it makes no context on the other GPU.
"""

from typing import Any  # the driver's bindings have their own types

import torch
from cuda.bindings import driver
from torch import Tensor

from loong.core.errors import ClusterError

_FILE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaMemory:
    """Implements SharedMemory for GPU number `index`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._sizes: dict[int, int] = {}  # by address
        torch.cuda.set_device(index)
        torch.cuda.synchronize()  # creates the context for the driver's calls

    def make(self, num_bytes: int) -> tuple[Tensor, int]:
        """See SharedMemory."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        properties.requestedHandleTypes = _FILE
        handle = _checked(driver.cuMemCreate(num_bytes, properties, 0))
        descriptor = int(_checked(driver.cuMemExportToShareableHandle(handle, _FILE, 0)))
        memory = _tensor_at(self._map(handle, num_bytes), num_bytes)
        memory.zero_()
        torch.cuda.synchronize()
        return memory, descriptor

    def open(self, descriptor: int, num_bytes: int) -> int:
        """See SharedMemory."""
        return self._map(_checked(driver.cuMemImportFromShareableHandle(descriptor, _FILE)), num_bytes)

    def close(self, address: int) -> None:
        """See SharedMemory."""
        torch.cuda.synchronize()
        size = self._sizes.pop(address)
        _checked(driver.cuMemUnmap(address, size))
        _checked(driver.cuMemAddressFree(address, size))

    def words(self, num_words: int, value: int) -> Tensor:
        """See SharedMemory."""
        return torch.full((num_words,), value, dtype=torch.int64, device="cpu").pin_memory()

    def _map(self, handle: Any, num_bytes: int) -> int:
        """Map the memory of a handle, and return its address. The mapping keeps the memory alive."""
        address = int(_checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))
        _checked(driver.cuMemMap(address, num_bytes, 0, handle, 0))
        _checked(driver.cuMemRelease(handle))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(address, num_bytes, [access], 1))
        self._sizes[address] = num_bytes
        return address


def copy_bytes(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy between two addresses on a stream, by a copy engine."""
    _checked(driver.cuMemcpyDtoDAsync(target, source, num_bytes, stream))


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call to the driver. Raises ClusterError if it failed."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ClusterError(f"the GPU's driver failed with {driver.CUresult(status).name}")
    return values[0] if values else None


class _Bytes:
    """Device memory, described by the CUDA array interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, num_bytes: int) -> Tensor:
    return torch.as_tensor(_Bytes(address, num_bytes), device="cuda")
