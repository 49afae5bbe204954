"""Tokens are those of transformers, whatever of a prompt was computed for other requests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import Cluster
from examples import seeds
from families import write_tiny_model
from killed_workers import restarting_cluster
from leak_checks import shared_cluster
from request_sessions import NUM_TOKENS, has_copies_that_are_read, sessions
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

CONFIG = PolicyConfig(max_num_batched_tokens=32, chunk_tokens=16, lease_steps=4)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in which KV of a position does not depend on what comes later."""
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keeping(plain_folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(str(plain_folder), kv_capacity=160, host_kv_capacity=96)
    with shared_cluster(config, keeps_prefixes=True) as running:
        yield running


@pytest.fixture(scope="module")
def keeping_sharded(plain_folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(
        str(plain_folder), num_instances=2, tp_size=2, kv_capacity=320, host_kv_capacity=96
    )
    with shared_cluster(config, keeps_prefixes=True) as running:
        yield running


@pytest.fixture(scope="module")
def keeping_memory(plain_folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(
        str(plain_folder), num_instances=2, memory_instances=2, kv_capacity=160, memory_kv_capacity=160
    )
    with shared_cluster(config, keeps_prefixes=True) as running:
        yield running


def num_cached(cluster: Cluster) -> int:
    return cluster.snapshot.stats.num_cached_tokens


@pytest.mark.parametrize("kind", ["keeping", "keeping_sharded", "keeping_memory"])
@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_any_valid_plans_give_the_tokens_of_transformers(
    request: pytest.FixtureRequest, kind: str, plain_folder: Path, seed: int
) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    requests, arrivals = sessions(plain_folder, Random(seed), 8)
    before = num_cached(cluster)
    outputs = cluster.run(requests, chaos(seed), arrivals=arrivals, timeout=60)
    assert_exact(plain_folder, requests, outputs)
    assert num_cached(cluster) > before


@pytest.mark.parametrize("policy", ["lamina", "lamina-by-request", "esp"])
def test_prompts_read_kv_on_memory_instances(
    keeping_memory: Cluster, plain_folder: Path, policy: str
) -> None:
    chosen = make_policy(policy, CONFIG)
    requests, arrivals = sessions(plain_folder, Random(policy), 8)
    assert_exact(plain_folder, requests, keeping_memory.run(requests, chosen, arrivals=arrivals))
    first = greedy_request(random_prompt(60, seed=len(policy)), NUM_TOKENS)
    assert_exact(plain_folder, [first], keeping_memory.run([first], chosen))
    before = keeping_memory.snapshot.stats
    again = replace(first, request_id=f"{first.request_id}-again")
    assert_exact(plain_folder, [again], keeping_memory.run([again], chosen))
    after = keeping_memory.snapshot.stats
    assert after.num_cached_tokens - before.num_cached_tokens == 59
    assert policy == "esp" or after.num_served_tokens > before.num_served_tokens


def test_the_loss_of_a_copy_changes_no_token(plain_folder: Path) -> None:
    config = ClusterConfig(str(plain_folder), num_instances=3, kv_capacity=200)
    with restarting_cluster(config, keeps_prefixes=True) as victims:
        for seed in range(2):
            requests, arrivals = sessions(plain_folder, Random(seed), 8)
            policy = victims.killing(chaos(seed), has_copies_that_are_read, seed, 1)
            outputs = victims.cluster.run(requests, policy, arrivals=arrivals, timeout=60)
            assert_exact(plain_folder, requests, outputs)
            victims.cluster.wait_until(lambda snapshot: len(snapshot.instances) == 3)
        stats = victims.cluster.snapshot.stats
        assert stats.num_losses
        assert stats.num_copied_tokens


@pytest.mark.parametrize(
    "policy",
    [
        "esp",
        "esp-no-apart",
        "esp-fixed-2",
        "static-sp",
        "replicas",
        "chunked-replicas",
        "esp-paper",
        "esp-disaggregated-2",
    ],
)
def test_policies_give_them_too(keeping: Cluster, plain_folder: Path, policy: str) -> None:
    requests, arrivals = sessions(plain_folder, Random(policy), 8)
    outputs = keeping.run(requests, make_policy(policy, CONFIG), arrivals=arrivals)
    assert_exact(plain_folder, requests, outputs)


@pytest.mark.parametrize("policy", ["esp", "esp-fixed-4", "esp-disaggregated-2", "static-sp", "replicas"])
def test_a_prompt_that_comes_again_is_computed_once(
    keeping: Cluster, plain_folder: Path, policy: str
) -> None:
    first = greedy_request(random_prompt(60, seed=sum(map(ord, policy))), NUM_TOKENS)
    again = replace(first, request_id=f"{first.request_id}-again")
    chosen = make_policy(policy, CONFIG)
    assert_exact(plain_folder, [first], keeping.run([first], chosen))
    before = num_cached(keeping)
    assert_exact(plain_folder, [again], keeping.run([again], chosen))
    assert num_cached(keeping) - before == 59  # all but the last token, at which the answer begins


@pytest.mark.parametrize("policy", ["esp-fixed-4", "static-sp"])
def test_many_equal_prompts_at_once_are_computed_once(
    keeping: Cluster, plain_folder: Path, policy: str
) -> None:
    first = greedy_request(random_prompt(70, seed=ord(policy[0])), NUM_TOKENS)
    requests = [replace(first, request_id=f"{first.request_id}-{i}") for i in range(12)]
    before = keeping.snapshot.stats
    outputs = keeping.run(requests, make_policy(policy, CONFIG))
    assert_exact(plain_folder, requests, outputs)
    after = keeping.snapshot.stats
    computed = after.num_computed_tokens - before.num_computed_tokens
    assert computed <= 70 + 11 * 1 + 12 * (NUM_TOKENS - 1)
