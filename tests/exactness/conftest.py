"""One cluster for all tests that need nothing special of theirs.

Its model has a rope that changes with the length of the sequence, so it shows whoever loses count of
positions or lengths. Its pools are small, so a few leaked slots are missed soon.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running_cluster
from families import write_tiny_model

from loong.launcher.local import ClusterConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama-dynamic", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def cluster(folder: Path) -> Iterator[Cluster]:
    """Instances 0 to 3, and their host tiers 4 to 7."""
    with running_cluster(ClusterConfig(str(folder), kv_capacity=192, host_kv_capacity=96)) as running:
        yield running
