"""Clusters for all tests without special needs.

Their model has a rope that changes with the length of the sequence, so wrong positions or lengths show. Their
pools are small, so a few leaked slots show soon.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from families import write_tiny_model
from leak_checks import shared_cluster

from loong.core.plan import BatchPlan
from loong.executor.lookahead import LookaheadMargin
from loong.launcher.cluster.config import ClusterConfig
from loong.model.tiny import tiny_model


class AtOnce(LookaheadMargin):
    """The end of every batch of one step is predicted as soon as it has begun."""

    def delay(self, plan: BatchPlan, planning: float = 0.0) -> float | None:
        """See LookaheadMargin."""
        return 0.0 if plan.num_steps == 1 else None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama-dynamic", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 to 3, and their host tiers 4 to 7."""
    tokenizer = tiny_model(folder.parent)  # of more tokens: those that the model lacks never come
    config = ClusterConfig(str(folder), kv_capacity=192, host_kv_capacity=96, tokenizer_folder=str(tokenizer))
    with shared_cluster(config) as running:
        yield running


@pytest.fixture(scope="session")
def predicting(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster as `cluster`, but with batches submitted while another runs where possible."""
    config = ClusterConfig(str(folder), kv_capacity=192, host_kv_capacity=96)
    with shared_cluster(config, lookahead=AtOnce(0.0, 0.0)) as running:
        yield running


@pytest.fixture(scope="session")
def sharded_overlapping(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster as `sharded`, but with batches submitted while another runs where possible."""
    config = ClusterConfig(str(folder), num_instances=2, tp_size=2, kv_capacity=384, host_kv_capacity=96)
    with shared_cluster(config, lookahead=AtOnce(0.0, 0.0)) as running:
        yield running


@pytest.fixture(scope="session")
def sharded(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 and 1 of two ranks each, and their host tiers 2 and 3."""
    config = ClusterConfig(
        str(folder),
        num_instances=2,
        tp_size=2,
        kv_capacity=384,
        host_kv_capacity=96,
        tokenizer_folder=str(tiny_model(folder.parent)),
    )
    with shared_cluster(config) as running:
        yield running


@pytest.fixture(params=["cluster", "sharded"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """Return each of the two, for behavior that may differ among the ranks of an instance."""
    found: Cluster = request.getfixturevalue(request.param)
    return found
