"""The GPUs of this host that workers use."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from loong.core.errors import ClusterError, ConfigError
from loong.hardware.devices import DEVICES
from loong.hardware.driver import MIB, DriverGpu, driver_gpus
from loong.hardware.measured_rates import MeasuredRates
from loong.scheduler.cost.roofline import DeviceRates

logger = logging.getLogger(__name__)

_MEASURING = 120.0  # seconds at most, most of them to load CUDA
_DIFFERENCE = 0.02  # of free memory, between hosts


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by the name that its maker gives it."""

    name: str
    free_bytes: int


def host_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this host that workers will see.

    Raises `ConfigError` if there is none, or the driver does not report how much of its memory is free.
    """
    if not _is_installed("pynvml"):
        raise ConfigError("--device cuda needs NVIDIA's management library; `pip install nvidia-ml-py`")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = driver_gpus(visible)
    if not gpus:
        among = "" if visible is None else f" among CUDA_VISIBLE_DEVICES={visible}"
        raise ConfigError(f"--device cuda needs an NVIDIA GPU, but the driver reports none{among}")
    return tuple(map(_usable, gpus))


def visible_devices(first: int, number: int) -> dict[str, str]:
    """Return the variable that shows processes `number` GPUs of this host, from the one numbered `first`.

    After the last GPU comes the first one.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [str(i) for i in range(len(host_gpus()))] if visible is None else visible.split(",")
    chosen = dict.fromkeys(named[i % len(named)] for i in range(first, first + number))
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def check_alike(hosts: Sequence[Sequence[Gpu]]) -> None:
    """Raise `ClusterError` if a host has other GPUs, or less free memory, than the first, where KV fits."""
    names, least = {gpu.name for gpu in hosts[0]}, min(gpu.free_bytes for gpu in hosts[0])
    for host_id, gpus in enumerate(hosts):
        for gpu in gpus:
            if gpu.name not in names:
                raise ClusterError(
                    f"host {host_id} has {gpu.name}, but host 0 has {', '.join(sorted(names))}"
                )
            if gpu.free_bytes < (1 - _DIFFERENCE) * least:
                raise ClusterError(
                    f"a GPU of host {host_id} has {gpu.free_bytes // MIB:,} MiB free, but those of host 0 "
                    f"have {least // MIB:,}; leave room by --gpu-memory-utilization or --kv-cache-tokens"
                )


def check_torch() -> None:
    """Raise `ConfigError` if the installed packages cannot run on GPUs; no GPU is initialized."""
    import torch  # which takes a while

    if torch.version.cuda is None:
        raise ConfigError(
            f"--device cuda needs a PyTorch for CUDA, but torch {torch.__version__} is for processors; "
            "on Linux `pip install torch` brings one into a new environment"
        )
    if not _is_installed("cuda.bindings"):
        raise ConfigError("--device cuda needs the CUDA driver's bindings; `pip install cuda-bindings`")


def cost_device(gpu: Gpu) -> str:
    """Return the key of DEVICES that a GPU is. One that is none of them is measured, which takes about 10 s.

    Raises `ConfigError` if it cannot be measured.
    """
    name = gpu.name.lower().replace(" ", "-")
    for key in DEVICES:
        if re.search(rf"\b{key}\b", name):
            return key
    logger.info("there is no roofline of %s, so its rates are measured", gpu.name)
    DEVICES[name] = measured_gpu(gpu)
    return name


def measured_gpu(gpu: Gpu) -> DeviceRates:
    """Return the rates of GPU 0, measured in a process of its own. Raises `ConfigError` if that fails."""
    known = f"there is no roofline of {gpu.name}, only of {', '.join(DEVICES)}, and measuring it"
    command = [sys.executable, "-c", "from loong.hardware.measured_rates import main; main()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURING, check=True)  # noqa: S603  our own code
        rates = msgspec.json.decode(done.stdout, type=MeasuredRates)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise ConfigError(f"{known} failed: {''.join(last)}") from error
    return rates.device_rates(gpu.free_bytes)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _usable(gpu: DriverGpu) -> Gpu:
    if gpu.free_bytes is None:
        raise ConfigError(f"the driver does not report how much memory of {gpu.name} is free")
    return Gpu(gpu.name, gpu.free_bytes)
