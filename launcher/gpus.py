"""The GPUs of this host, as its driver tells without taking any of their memory."""

import os
from dataclasses import dataclass

from loong.core.errors import ConfigError
from loong.launcher.machine import output_of
from loong.scheduler.roofline import DEVICES

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by the name that its maker gives it."""

    name: str
    total_bytes: int
    free_bytes: int


def host_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this host that workers will see. Raises `ConfigError` if there is none."""
    query = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    lines = output_of("nvidia-smi", *query).splitlines()
    if not lines:
        raise ConfigError("--device cuda needs an NVIDIA GPU, but nvidia-smi tells of none")
    return tuple(_parsed(line) for line in lines)


def cost_device(gpu: Gpu) -> str:
    """Which of DEVICES a GPU is. Raises `ConfigError` if it is none of them."""
    for key in DEVICES:
        if key in gpu.name.lower():
            return key
    raise ConfigError(f"there is no roofline of {gpu.name}, only of {', '.join(DEVICES)}")


def _parsed(line: str) -> Gpu:
    name, total, free = line.split(", ")
    return Gpu(name, int(total) * MIB, int(free) * MIB)
