"""Layers with a window that keep few tokens give the tokens of transformers, wherever KV is or was lost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from examples import seeds
from families import write_tiny_model
from killed_workers import Victims, has_output, restarting_cluster
from plans import in_group
from request_sessions import sessions
from requests_for_tests import assert_exact, expected, greedy_request, random_prompt

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidPlanError
from loong.core.instructions import MoveKV, ReleaseWindows, RunBatch
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

WINDOW, CAPACITY, MOST_TRIES = 9, 102, 100
CONFIG = PolicyConfig(max_num_batched_tokens=8, chunk_tokens=8, lease_steps=4)


@dataclass(frozen=True)
class Model:
    """A model, and the instances that serve it, which start again when they are lost."""

    folder: Path
    victims: Victims


@pytest.fixture(scope="module", params=["gemma-3", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = write_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    config = ClusterConfig(
        str(folder),
        num_instances=3,
        memory_instances=1,
        kv_capacity=240,
        host_kv_capacity=96,
        windows=WindowMemory.of(WINDOW, CAPACITY, 3 * CONFIG.max_num_batched_tokens),
    )
    with restarting_cluster(config, keeps_prefixes=True) as victims:
        yield Model(folder, victims)


def keeping_rules(policy: Policy) -> Policy:
    """Return the policy, which plans again until it keeps the rules."""

    def plans(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        for _ in range(MOST_TRIES):
            plan = policy(snapshot, cost_model)
            try:
                check_plan(snapshot, plan)
            except InvalidPlanError:
                continue
            if snapshot.is_anything_in_flight or plan != IterationPlan():
                return plan
        return IterationPlan()

    return plans


def num_dropped(log: Sequence[object]) -> int:
    """Return the tokens whose KV was dropped in layers with a window, once for each instance."""
    dropped = [item for item in log if isinstance(item, ReleaseWindows)]
    return sum(len(item.instance_ids) * len(item.positions) for item in dropped)


@pytest.mark.parametrize("dop", [1, 2, 3])
def test_long_requests_are_exact_at_any_dop(model: Model, dop: int) -> None:
    cluster = model.victims.cluster
    requests = [greedy_request(random_prompt(length, seed=dop), 8) for length in (130, 90)]
    before = cluster.snapshot.stats.num_window_dropped_tokens
    group = cluster.full_ids[-dop:]
    assert_exact(model.folder, requests, cluster.run(requests, in_group(*group, chunk=17, num_steps=3)))
    if dop == 1:
        assert num_dropped(cluster.log) > 0
    assert cluster.snapshot.stats.num_window_dropped_tokens - before == num_dropped(cluster.log)


def test_long_decodes_are_exact_with_kv_of_other_instances(model: Model) -> None:
    cluster = model.victims.cluster
    requests = [greedy_request(random_prompt(length, seed=5), 60) for length in (100, 90, 40)]
    policy = make_policy("lamina", PolicyConfig(max_num_batched_tokens=16, lease_steps=3))
    assert_exact(model.folder, requests, cluster.run(requests, policy))
    runs = [item for item in cluster.log if isinstance(item, RunBatch)]
    assert cluster.memory_ids in {run.holder_ids for run in runs if run.plan.num_steps > 1}


def test_a_conversation_goes_on_from_its_last_window(model: Model) -> None:
    cluster, policy = model.victims.cluster, make_policy("esp", CONFIG)
    prompt = random_prompt(150, seed=3)
    first = greedy_request(prompt, 8)
    assert_exact(model.folder, [first], cluster.run([first], policy))
    others = [greedy_request(random_prompt(90, seed=10 + i), 4) for i in range(2)]
    assert_exact(model.folder, others, cluster.run(others, policy))
    answer, _ = expected(model.folder, prompt, 8)
    before = cluster.snapshot.stats.num_cached_tokens
    second = greedy_request((*prompt, *answer, *random_prompt(10, seed=4)), 8)
    assert_exact(model.folder, [second], cluster.run([second], policy))
    num_cached = cluster.snapshot.stats.num_cached_tokens - before
    assert num_cached <= 150 + 7  # all of it, unless others have taken the room of its last window


def test_prompts_with_one_beginning_are_exact(model: Model) -> None:
    cluster = model.victims.cluster
    requests = [greedy_request(random_prompt(length, seed=8), 12) for length in (130, 60)]
    assert_exact(model.folder, requests, cluster.run(requests, make_policy("esp", CONFIG)))


@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_random_plans_and_a_loss_change_no_token(model: Model, seed: int) -> None:
    cluster = model.victims.cluster
    requests, arrivals = sessions(model.folder, Random(seed), 6)
    before = num_dropped(cluster.log), cluster.snapshot.stats.num_joins
    policy = model.victims.killing(keeping_rules(chaos(seed)), has_output(1), 0, 1)
    outputs = cluster.run(requests, policy, arrivals=arrivals, timeout=60)
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before[1] + 1)
    assert_exact(model.folder, requests, outputs)
    assert any(isinstance(item, MoveKV) for item in cluster.log)


def test_a_loss_under_the_default_policy_changes_no_token(model: Model) -> None:
    cluster = model.victims.cluster
    requests, arrivals = sessions(model.folder, Random(2), 5)
    before = cluster.snapshot.stats.num_joins
    policy = model.victims.killing(make_policy("esp", CONFIG), has_output(2), 1, 1)
    assert_exact(model.folder, requests, cluster.run(requests, policy, arrivals=arrivals, timeout=60))
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before + 1)
