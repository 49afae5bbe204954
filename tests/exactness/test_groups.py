"""Groups run at their own pace."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster import After, Cluster
from families import write_tiny_model
from leak_checks import shared_cluster
from plans import decode, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.events import BatchFinished
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.policy import Policy


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def pair(llama: Path) -> Iterator[Cluster]:
    """Yield two instances with room for a prompt that takes long."""
    with shared_cluster(ClusterConfig(str(llama), num_instances=2, kv_capacity=4096)) as running:
        yield running


def during(cluster: Cluster, group: tuple[InstanceId, ...], index: int = 0) -> list[RunBatch]:
    """Return the batches of other groups that began and finished while one batch of `group` ran."""
    batches = [reported for reported in cluster.log if isinstance(reported, RunBatch)]
    slow = [batch for batch in batches if batch.plan.group.instance_ids == group][index]
    finished = [reported.batch_id for reported in cluster.log if isinstance(reported, BatchFinished)]
    earlier = finished[: finished.index(slow.batch_id)]
    return [batch for batch in batches if batch.batch_id in earlier and batch.batch_id > slow.batch_id]


def apart(groups: Mapping[RequestId, tuple[InstanceId, ...]], num_steps: Mapping[RequestId, int]) -> Policy:
    """Each request alone on its group, all of its prompt at once; in leases if it has `num_steps`."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        idle = {instance.instance_id for instance in snapshot.instances if instance.is_idle}
        batches: list[BatchPlan] = []
        for view in plannable(snapshot):
            request_id, group = view.request_id, groups[view.request_id]
            steps = num_steps.get(request_id, 1)
            if not idle.issuperset(group):
                continue
            idle.difference_update(group)
            if view.is_decoding:
                batches.append(decode([view], group, {request_id: group[-1]}, num_steps=steps))
            else:
                batches.append(prefill([view], group))
        return IterationPlan(tuple(batches))

    return policy


def test_a_long_prefill_does_not_delay_the_decode_steps_of_another_group(pair: Cluster, llama: Path) -> None:
    long = greedy_request(random_prompt(4000, seed=8), 2)
    short = greedy_request(random_prompt(20, seed=9), 100)
    policy = apart({long.request_id: (0,), short.request_id: (1,)}, {})
    outputs = pair.run([short, long], policy, arrivals={long.request_id: After(short.request_id, 2)})
    assert_exact(llama, [long, short], outputs)
    assert len(during(pair, (0,))) >= 3


def test_a_long_lease_does_not_delay_what_another_group_does(cluster: Cluster, folder: Path) -> None:
    """One group takes 120 steps on one plan, while the other finishes batch after batch."""
    leased = greedy_request(random_prompt(20, seed=8), 121)
    others = [greedy_request(random_prompt(length, seed=length), 5) for length in (30, 7, 12)]
    groups = {leased.request_id: (2, 0), **{other.request_id: (1, 3) for other in others}}
    arrivals = {
        other.request_id: After(leased.request_id, 3 + 20 * number) for number, other in enumerate(others)
    }
    outputs = cluster.run([leased, *others], apart(groups, {leased.request_id: 120}), arrivals=arrivals)
    assert_exact(folder, [leased, *others], outputs)
    assert len(during(cluster, (2, 0), index=1)) >= 3
