"""Clusters of this machine: which cannot be started, and what their server does without."""

import subprocess
import sys

import pytest

from loong.core.errors import ConfigError
from loong.launcher.serve.local import ClusterConfig


def test_a_size_below_one_is_named_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^num_instances must be at least 1, but is 0$"):
        ClusterConfig("some-model", num_instances=0)
    with pytest.raises(ConfigError, match=r"^tp_size must be at least 1, but is 0$"):
        ClusterConfig("some-model", tp_size=0)
    with pytest.raises(ConfigError, match=r"^kv_capacity must be at least 1, but is -1$"):
        ClusterConfig("some-model", kv_capacity=-1)


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
