"""Flags of hosts that cannot work are refused by name, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cli import build_parser
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.ray_cluster import bundles_of, warn_if_open
from loong.launcher.cluster_flags import chosen_cluster

WITHOUT_RAY = """
import importlib.util
import sys
from loong.launcher.entry import main

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
sys.argv = ["loong", "serve", "--hosts", "ray", "--port", "0"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("mode", "is_open"), [(None, True), ("disabled", True), ("token", False), ("TOKEN", False)]
)
def test_a_cluster_that_needs_no_token_is_warned_of(
    mode: str | None, is_open: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    warn_if_open("10.0.0.1:6379")
    assert ("the Ray cluster at 10.0.0.1:6379 needs no token" in caplog.text) == is_open


def test_several_hosts_need_ray() -> None:
    args = build_parser(["serve"])[0].parse_args(["serve", "--num-hosts", "2"])
    with pytest.raises(ConfigError, match=r"^--num-hosts is 2, which needs --hosts ray$"):
        chosen_cluster(args, start_timeout=1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention-kernels", "cudnn"], "needs --device cuda"),
        (["--attention-kernels", "fa3", "--device", "cuda"], r"pip install 'loong-serving\[fa3\]'"),
    ],
)
def test_kernels_that_are_not_there_are_named(words: list[str], message: str) -> None:
    args = build_parser(["serve"])[0].parse_args(["serve", *words])
    with pytest.raises(ConfigError, match=message):
        chosen_cluster(args, start_timeout=1.0)


def test_a_missing_ray_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert (
        "--hosts ray needs Ray, which is not installed; `pip install '.[ray]'` in its folder" in ended.stderr
    )


def test_more_hosts_than_instances_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--num-hosts is 3, but --num-instances is 2$"):
        ClusterConfig("some-model", num_instances=2, num_hosts=3)


def test_each_host_reserves_a_gpu_for_each_of_its_workers() -> None:
    assert bundles_of([2, 1], "10.0.0.1", has_gpus=True) == [
        {"CPU": 2, "GPU": 2, "node:10.0.0.1": 0.001},
        {"CPU": 1, "GPU": 1},
    ]
    assert bundles_of([2, 1], "10.0.0.1", has_gpus=False)[1] == {"CPU": 1}


def test_instances_that_are_added_take_hosts_in_turn() -> None:
    config = ClusterConfig("some-model", num_instances=4, num_hosts=2, max_instances=7)
    assert config.host_ids == (0, 0, 1, 1, 0, 1, 0)
    assert [instance.host_id for instance in config.instances] == [0, 0, 1, 1]
