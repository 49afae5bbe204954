"""The GPUs of this host, as NVIDIA's driver reports them without allocating their memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

MIB = 2**20


class DriverGpu(NamedTuple):
    """One GPU. Its free memory is None where the driver does not report it."""

    name: str
    total_bytes: int
    free_bytes: int | None


def driver_gpus(visible: str | None = None) -> tuple[DriverGpu, ...]:
    """Return all GPUs, or those that `visible` names as CUDA_VISIBLE_DEVICES does.

    Returns nothing without a driver, or if a GPU that is named does not exist.
    """
    with _driver() as nvml:
        if nvml is None:
            return ()
        try:
            handles = _handles(nvml, visible)
        except nvml.NVMLError:
            return ()
        return tuple(_gpu(nvml, handle) for handle in handles)


def driver_version() -> str:
    """Return the version of the driver, nothing without one."""
    with _driver() as nvml:
        return "" if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@contextmanager
def _driver() -> Iterator[Any]:  # Any: a module without types
    """Yield the driver's interface, or None where there is none."""
    try:
        import pynvml  # of nvidia-ml-py, which only hosts with GPUs need

        pynvml.nvmlInit()
    except ModuleNotFoundError:
        yield None
    except pynvml.NVMLError:
        yield None
    else:
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()


def _handles(nvml: Any, visible: str | None) -> Sequence[object]:
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _gpu(nvml: Any, handle: object) -> DriverGpu:
    name = str(nvml.nvmlDeviceGetName(handle))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return DriverGpu(name, 0, None)
    return DriverGpu(name, memory.total, memory.free // MIB * MIB)
