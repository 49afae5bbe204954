"""Clusters of this machine: which cannot be started, and what their server does without."""

import subprocess
import sys
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher.serve.local import ClusterConfig, local_workers


def test_a_size_below_one_is_named_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^num_instances must be at least 1, but is 0$"):
        ClusterConfig("some-model", num_instances=0)
    with pytest.raises(ConfigError, match=r"^tp_size must be at least 1, but is 0$"):
        ClusterConfig("some-model", tp_size=0)
    with pytest.raises(ConfigError, match=r"^kv_capacity must be at least 1, but is -1$"):
        ClusterConfig("some-model", kv_capacity=-1)


async def test_a_folder_too_deep_for_sockets_is_named_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"107 are the most; set TMPDIR to a shorter one"):
        async with local_workers(ClusterConfig("some-model", num_instances=1)):
            pass
    assert not list(deep.iterdir())


PREPARED = """
import sys
from loong.launcher.serve import serving
from loong.launcher.cli import build_parser
from loong.launcher.serve.command import serve_config

serve_config(build_parser(["serve"])[0].parse_args(["serve"]))
raise SystemExit("torch" in sys.modules)
"""


def test_a_server_whose_workers_compute_does_not_import_torch() -> None:
    assert subprocess.run([sys.executable, "-c", PREPARED], check=False).returncode == 0
