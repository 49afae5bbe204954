"""Layers with a window have as much room in virtual time as workers give them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import write_tiny_model
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.core.window_memory import WindowMemory
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.launcher.cli import build_parser, main
from loong.launcher.cluster_flags import chosen_cluster
from loong.launcher.simulate.chosen_hardware import chosen_hardware
from loong.model.shapes import SHAPES, find_config
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.roofline import kv_capacity
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import Hardware, SimulatedCluster
from loong.simulation.config import Load
from loong.simulation.run import SimulatedRun, simulate
from loong.worker.kv.pool import KVPool
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

LOOSE = parse_slo("ttft:600000 tpot:1000").limits_of(None)
WINDOW, ROOM = 16, 200
CONFIG = PolicyConfig(max_num_batched_tokens=16, lease_steps=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("gemma-3", tmp_path_factory.mktemp("model"))


def test_the_room_of_a_simulated_instance_is_that_of_a_workers_pool(folder: Path) -> None:
    config, num_window_tokens, num_bytes = find_config(str(folder), "auto"), 100, 1_000_000
    device = replace(DEVICES["cpu"], memory_bytes=num_bytes)
    capacity = kv_capacity(
        shape_of(config), device, 1, 1.0, has_weights=False, window_tokens=num_window_tokens
    )
    pool = KVPool(config.kv_layout(), capacity, torch.device("cpu"), num_window_slots=num_window_tokens)
    layout = config.kv_layout()
    taken = sum(pool.layer(layer).nbytes for layer in range(layout.num_layers))
    num_spare = layout.num_window_layers * layout.row_bytes  # the row that stands for no slot
    assert taken <= num_bytes + num_spare
    assert taken + layout.bytes_per_token - layout.window_bytes_per_token > num_bytes + num_spare


@pytest.mark.parametrize("model", ["gemma-3-27b", "gpt-oss-20b"])
def test_a_smaller_window_room_leaves_more_room_for_other_layers(model: str) -> None:
    shape = shape_of(SHAPES[model])
    whole = kv_capacity(shape, DEVICES["h200"])
    for num_window_tokens in (1_000, 50_000, whole):
        found = kv_capacity(shape, DEVICES["h200"], window_tokens=num_window_tokens)
        others = shape.kv_bytes - shape.window_kv_bytes
        taken = found * others + num_window_tokens * shape.window_kv_bytes
        assert taken == pytest.approx(whole * shape.kv_bytes, abs=shape.kv_bytes)


def test_flags_of_a_server_and_of_a_simulation_give_the_same_memory(folder: Path) -> None:
    flags = [
        *("--model", str(folder), "--num-instances", "2", "--window-kv-tokens", "400"),
        *("--max-num-batched-tokens", "32", "--kv-cache-tokens", "3000", "--device", "cpu"),
    ]
    served = chosen_cluster(build_parser(["serve"])[0].parse_args(["serve", *flags]), 60.0).cluster
    _, hardware = chosen_hardware(build_parser(["simulate"])[0].parse_args(["simulate", *flags]))
    simulated = hardware.cluster("esp")
    assert served.windows is not None
    assert simulated.windows == served.windows
    assert [i.kv_capacity for i in simulated.instances] == [i.kv_capacity for i in served.instances]


@pytest.mark.parametrize("command", ["serve", "simulate"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "llama-3.1-8b"], "0 of 32 have one"),
        (["--model", "gemma-3-1b", "--policy", "replicas"], "needs --policy esp, but it is replicas"),
        (["--model", "gemma-3-1b", "--num-instances", "3"], "it needs 50176 at least"),
    ],
)
def test_memory_that_cannot_be_is_refused_alike(
    command: str, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--load-format", "dummy"] if command == "serve" else ["--rate", "1"]
    assert main([command, *flags, *more, "--window-kv-tokens", "2000"]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def run(capacity: int, windows: WindowMemory | None) -> SimulatedRun:
    """Run conversations of three turns, and long prompts between them."""
    model = WorkCostModel(replace(Coefficients(), token=1e-3, weights=1e-2))
    cluster = SimulatedCluster(instances_with([capacity, capacity]), model, 2 * capacity, windows)
    sent = []
    for number in range(18):
        first = TokenRun(number % 6, 90 if number % 2 else 20)
        runs = (first, TokenRun(10 + number % 6, 30), TokenRun(30 + number, 9))
        sent.append(WorkloadRequest(0.25 * number, RequestShape(runs[number // 6 :: 2] + runs[2:], 25)))
    return simulate(make_policy("esp", CONFIG), cluster, Load(sent), LOOSE)


def test_windows_with_room_for_all_tokens_change_no_time() -> None:
    memory = WindowMemory.of(WINDOW, 10_000, 2 * CONFIG.max_num_batched_tokens)
    without, found = run(300, None), run(300, memory)
    assert [r.token_times for r in found.records] == [r.token_times for r in without.records]
    assert found.stats == without.stats
    assert found.stats.num_window_dropped_tokens == 0


def test_all_requests_end_where_windows_have_little_room() -> None:
    found = run(300, WindowMemory.of(WINDOW, ROOM, 2 * CONFIG.max_num_batched_tokens))
    assert all(record.error is None for record in found.records)
    assert found.stats.num_window_dropped_tokens > 0
    assert found.stats.num_failed == 0


def test_a_device_without_room_for_the_windows_names_them() -> None:
    shape = shape_of(SHAPES["gemma-3-27b"])
    windows = WindowMemory.of(shape.window, 60_000, 8192)
    with pytest.raises(ConfigError, match="--window-kv-tokens 60000 leave no room for KV on 1 x h100"):
        Hardware(shape, "h100", 1, windows=windows).cluster("esp")
