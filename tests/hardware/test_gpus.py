import re
import sys
from pathlib import Path

import pytest
import torch
from machines import H200_GRAPH_LIMITS

from loong.core.cost.cuda_graph_limits import NO_GRAPHS
from loong.core.errors import ClusterError, ConfigError
from loong.fabric.memory.chunked_channel import ChunkedChannel
from loong.fabric.memory.symmetric import SIZES
from loong.hardware.gpus import Gpu, check_alike, check_torch, cost_device, host_gpus
from loong.hardware.memory import GRAPH_BYTES, ClusterSize, arena_bytes, fit_gpu_kv_capacity
from loong.model.shapes import SHAPES
from loong.model.tensor_parallel import Shard
from loong.model.tiny import CONFIG
from loong.worker.steps.mailbox_exchange import num_mailbox_bytes

WEIGHTS = 4 * (2 * 264 * 64 + 64 + 2 * (2 * 64 + (64 + 32 + 32 + 64) * 64 + 3 * 192 * 64))
ROOM = 1000 * CONFIG.kv_layout().bytes_per_token
GRAPHS = GRAPH_BYTES + H200_GRAPH_LIMITS.num_copied(2000) * CONFIG.kv_layout().row_bytes


def install_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A program of the driver's name that prints these lines."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def gpu(free_bytes: int) -> Gpu:
    return Gpu("NVIDIA H200", free_bytes)


def test_the_driver_reports_names_and_memory_of_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, "NVIDIA H200, 143000", "NVIDIA A100-SXM4-80GB, 3")
    first, second = host_gpus()
    assert first == Gpu("NVIDIA H200", 143000 << 20)
    assert [cost_device(first), cost_device(second)] == ["h200", "a100"]


def test_a_host_without_gpus_and_a_gpu_without_a_roofline_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-smi reports none"):
        host_gpus()
    with pytest.raises(ConfigError, match="no roofline of NVIDIA T4, only of h200"):
        cost_device(Gpu("NVIDIA T4", 1))


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


def test_the_driver_is_asked_for_the_gpus_that_workers_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, "all")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor last; do :; done\n[ "$last" = --id=2,3 ] && echo "NVIDIA H200, 8"\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert host_gpus() == (Gpu("NVIDIA H200", 8 << 20),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"reports none among CUDA_VISIBLE_DEVICES=$"):
        host_gpus()


def test_a_driver_that_does_not_report_the_memory_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(tmp_path, monkeypatch, "NVIDIA H200, [N/A]")
    with pytest.raises(ConfigError, match=r"how much memory is free: 'NVIDIA H200, \[N/A\]'"):
        host_gpus()
