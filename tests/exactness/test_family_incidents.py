"""Experts, windows, sinks and KV in FP8 keep their tokens under losses, joins, random plans and reuse."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import After
from families import write_tiny_model
from fp8_answers import alone, answers, assert_same
from killed_workers import Victims, has_output, restarting_cluster
from request_sessions import sessions
from requests_for_tests import assert_exact

from loong.core.request import Request
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

KINDS = [  # with the number of instances and their tp size
    ("qwen3-moe", "auto", 2, 2),
    ("gpt-oss", "auto", 3, 1),
    ("gpt-oss", "auto", 2, 2),
    ("gemma-3", "auto", 3, 1),
    ("gemma-3", "fp8", 2, 2),
]
CONFIG = PolicyConfig(max_num_batched_tokens=32, chunk_tokens=16, lease_steps=4)


@dataclass(frozen=True)
class Model:
    """A model, and the instances that serve it, which start again when they are lost."""

    folder: Path
    victims: Victims
    kv_cache_dtype: str

    def run(self, requests: list[Request], arrivals: dict[str, After], policy: Policy) -> None:
        """Run requests, which get the tokens of an undisturbed run, while an instance is lost and joins."""
        cluster = self.victims.cluster
        wanted = [alone(cluster, request) for request in requests] if self.kv_cache_dtype == "fp8" else []
        before = cluster.snapshot.stats
        outputs = cluster.run(requests, policy, arrivals=arrivals, timeout=60)
        cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + 1)
        assert cluster.snapshot.stats.num_losses == before.num_losses + 2  # the instance and its host tier
        assert cluster.snapshot.stats.num_cached_tokens > before.num_cached_tokens
        if self.kv_cache_dtype == "fp8":
            assert_same(answers(requests, outputs), wanted)
        else:
            assert_exact(self.folder, requests, outputs)


@pytest.fixture(scope="module", params=KINDS, ids="{0[0]} {0[1]}, {0[2]} of tp {0[3]}".format)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    family, kv_cache_dtype, num_instances, tp_size = request.param
    folder = write_tiny_model(family, tmp_path_factory.mktemp("model"))
    config = ClusterConfig(
        str(folder),
        num_instances=num_instances,
        tp_size=tp_size,
        kv_capacity=600 // num_instances,
        host_kv_capacity=96,
        kv_cache_dtype=kv_cache_dtype,
    )
    with restarting_cluster(config, keeps_prefixes=True) as victims:
        yield Model(folder, victims, kv_cache_dtype)


def test_random_plans_and_a_loss_change_no_token(model: Model) -> None:
    requests, arrivals = sessions(model.folder, Random(0), 6)
    model.run(requests, arrivals, model.victims.killing(chaos(0), has_output(1), 0, 1))


def test_a_loss_under_the_default_policy_changes_no_token(model: Model) -> None:
    requests, arrivals = sessions(model.folder, Random(2), 5)
    policy = make_policy("esp", CONFIG)
    model.run(requests, arrivals, model.victims.killing(policy, has_output(2), 1, 1))
