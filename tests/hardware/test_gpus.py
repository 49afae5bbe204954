import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeAlias

import pytest
import torch
from machines import H200_GRAPH_LIMITS

from loong.core.cost.cuda_graph_limits import NO_GRAPHS
from loong.core.errors import ClusterError, ConfigError
from loong.fabric.memory.chunked_channel import ChunkedChannel
from loong.fabric.memory.symmetric_fabric import SIZES
from loong.hardware.gpus import Gpu, check_alike, check_torch, cost_device, host_gpus
from loong.hardware.machine import machine_facts
from loong.hardware.measured_rates import measure
from loong.hardware.memory import (
    GRAPH_BYTES,
    LIST_BYTES_A_TOKEN,
    ClusterSize,
    arena_bytes,
    fit_gpu_kv_capacity,
)
from loong.model.shapes import SHAPES
from loong.model.tensor_parallel import Shard
from loong.model.tiny import CONFIG
from loong.worker.steps.mailbox_exchange import num_mailbox_bytes

WEIGHTS = 4 * (2 * 264 * 64 + 64 + 2 * (2 * 64 + (64 + 32 + 32 + 64) * 64 + 3 * 192 * 64))
ROOM = 1000 * (CONFIG.kv_layout().bytes_per_token + LIST_BYTES_A_TOKEN)
GRAPHS = GRAPH_BYTES + H200_GRAPH_LIMITS.num_copied(2000) * CONFIG.kv_layout().row_bytes


class NVMLError(Exception):
    """The error of every call of the driver's interface."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a GPU in bytes; `free` is None where the driver does not report it."""

    total: int
    free: int | None


class Driver(ModuleType):
    """The driver's interface, with these GPUs: names and free MiB, in the order of their indices."""

    NVMLError = NVMLError

    def __init__(self, *gpus: tuple[str, int | None], is_loaded: bool = True) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self._gpus, self._is_loaded, self.num_open = gpus, is_loaded, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._is_loaded:
            raise NVMLError
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "590.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self._gpus):
            raise NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self._gpus[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Memory:  # noqa: N802
        free = self._gpus[handle][1]
        if free is None:
            raise NVMLError
        return Memory(200_000 << 20, (free << 20) + 5)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    """Return what makes a driver that of this host."""

    def installed(driver: Driver) -> Driver:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return installed


Install: TypeAlias = Callable[[Driver], Driver]


def gpu(free_bytes: int) -> Gpu:
    return Gpu("NVIDIA H200", free_bytes)


def test_the_driver_reports_names_and_memory_of_all_gpus(install: Install) -> None:
    driver = install(Driver(("NVIDIA H200", 143000), ("NVIDIA A100-SXM4-80GB", 3)))
    first, second = host_gpus()
    assert first == Gpu("NVIDIA H200", 143000 << 20)
    assert [cost_device(first), cost_device(second)] == ["h200", "a100"]
    gpus = "NVIDIA H200, 200000 MiB, 590.1\nNVIDIA A100-SXM4-80GB, 200000 MiB, 590.1"
    assert machine_facts()["gpus"] == gpus
    assert driver.num_open == 0


def test_a_host_without_gpus_and_a_gpu_without_a_roofline_are_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver in (Driver(), Driver(("NVIDIA H200", 1), is_loaded=False)):
        install(driver)
        with pytest.raises(ConfigError, match="the driver reports none"):
            host_gpus()
        assert "gpus" not in machine_facts()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="`pip install nvidia-ml-py`"):
        host_gpus()
    assert "gpus" not in machine_facts()
    with pytest.raises(
        ConfigError, match=r"no roofline of NVIDIA T4, only of h200, .* measuring it failed: .+"
    ):
        cost_device(Gpu("NVIDIA T4", 1))  # a real measurement, by a torch for processors


def test_a_gpu_is_known_by_a_whole_word_of_its_name() -> None:
    names = {"NVIDIA A10": "a10", "NVIDIA GeForce RTX 4090": "rtx-4090", "NVIDIA L40S": "l40s"}
    names |= {"NVIDIA B200": "b200", "NVIDIA H100 80GB HBM3": "h100"}
    assert {name: cost_device(Gpu(name, 1)) for name in names} == names


def test_an_unknown_gpu_gets_the_rates_that_are_measured() -> None:
    measured = measure("cpu", num_bytes=1 << 12, size=16, seconds=0.0)
    rates = measured.device_rates(24e9)
    assert rates.linear_flops == measured.flops > 0
    assert rates.memory_bandwidth == measured.memory_bandwidth > 0
    assert rates.link_bandwidth == rates.host_bandwidth == measured.host_bandwidth > 0
    assert rates.part_flops / rates.linear_flops == pytest.approx(540 / 645)


def test_a_torch_for_processors_and_missing_bindings_are_named_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=f"but torch {re.escape(torch.__version__)} is for processors"):
        check_torch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="`pip install cuda-bindings`"):
        check_torch()


def test_kv_takes_what_weights_and_graphs_leave_of_the_fullest_gpu_that_is_used() -> None:
    least = gpu(2 * (WEIGHTS + GRAPHS + arena_bytes(CONFIG, ClusterSize(2, 1)) + ROOM))
    gpus = [gpu(1 << 40), least, gpu(1)]
    assert fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(2, 1), None, 0.5, H200_GRAPH_LIMITS) == 1000
    assert fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(2, 1), 900, 0.5, H200_GRAPH_LIMITS) == 900


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-2-7b", "llama-3.1-70b"])
@pytest.mark.parametrize("size", [ClusterSize(2, 1), ClusterSize(8, 1), ClusterSize(4, 2), ClusterSize(1, 8)])
def test_workers_lay_no_more_into_an_arena_than_is_kept_for_it(name: str, size: ClusterSize) -> None:
    config, num_ranks = SHAPES[name], size.num_gpus
    laid = sum(ChunkedChannel.num_bytes(channel, num_ranks) for channel in SIZES.values())
    laid += num_mailbox_bytes(size.num_instances, Shard(config, 0, size.tp_size))
    assert laid <= arena_bytes(config, size) <= 1.15 * laid


def test_each_host_needs_gpus_for_its_own_instances_alone() -> None:
    gpus = [gpu(1 << 40)]
    assert fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(2, 1, num_hosts=2), 900, 0.5, NO_GRAPHS) == 900
    with pytest.raises(ConfigError, match=r"--num-instances is 3 on 2 hosts and .* but this host has 1 GPUs"):
        fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(3, 1, num_hosts=2), 900, 0.5, NO_GRAPHS)


def test_hosts_with_other_or_fuller_gpus_than_the_first_are_named() -> None:
    check_alike([[gpu(1000 << 20)], [gpu(990 << 20), gpu(2000 << 20)]])
    with pytest.raises(
        ClusterError, match="a GPU of host 1 has 900 MiB free, but those of host 0 have 1,000"
    ):
        check_alike([[gpu(1000 << 20)], [gpu(900 << 20)]])
    with pytest.raises(ClusterError, match="host 2 has NVIDIA T4, but host 0 has NVIDIA H200"):
        check_alike([[gpu(1)], [gpu(1)], [Gpu("NVIDIA T4", 1)]])


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    gpus = [gpu(WEIGHTS + GRAPHS + arena_bytes(CONFIG, ClusterSize(1, 1)) + ROOM)]
    with pytest.raises(
        ConfigError, match=r"for 1,001 tokens\. .* --gpu-memory-utilization 1 .*tokens 1000 would"
    ):
        fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(1, 1), 1001, 1.0, H200_GRAPH_LIMITS)
    with pytest.raises(ConfigError, match="GiB of weights, "):
        fit_gpu_kv_capacity(CONFIG, [gpu(WEIGHTS)], ClusterSize(1, 1), None, 1.0, H200_GRAPH_LIMITS)
    with pytest.raises(
        ConfigError, match="--num-instances is 1 and --tensor-parallel-size 2, but this host has 1"
    ):
        fit_gpu_kv_capacity(CONFIG, gpus, ClusterSize(1, 2), None, 1.0, H200_GRAPH_LIMITS)


@pytest.mark.parametrize("visible", ["2,1", " 2, GPU-1", "GPU-2,GPU-1,"])
def test_only_gpus_that_workers_may_see_are_reported(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    install(Driver(("NVIDIA T4", 7), ("NVIDIA H200", 8), ("NVIDIA H100", 9)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host_gpus() == (Gpu("NVIDIA H100", 9 << 20), Gpu("NVIDIA H200", 8 << 20))


@pytest.mark.parametrize("visible", ["", "3", "0,GPU-3"])
def test_a_host_without_the_gpus_that_workers_may_see_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    install(Driver(("NVIDIA H200", 8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"reports none among CUDA_VISIBLE_DEVICES={visible}$"):
        host_gpus()


def test_a_driver_that_does_not_report_the_memory_is_named(install: Install) -> None:
    install(Driver(("NVIDIA H200", None)))
    with pytest.raises(ConfigError, match="how much memory of NVIDIA H200 is free"):
        host_gpus()
