"""Requests go on while instances join and leave: their tokens are those of an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import After, Cluster, running_cluster
from plans import prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId, Placement
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST
from loong.scheduler.policy import Policy, make_policy

FIRST, MOST = 2, 4
NUM_OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def changing(folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(str(folder), num_instances=FIRST, max_instances=MOST, kv_capacity=256)
    with running_cluster(config, lookahead=LookaheadMargin.on(DEFAULT_HOST), backoff=Backoff()) as cluster:
        yield cluster


def scaling(cluster: Cluster, policy: Policy, least: int, late_ids: frozenset[RequestId]) -> Policy:
    """Return the policy, under which the cluster grows to `MOST` instances and then shrinks to `least`.

    Requests wait until all are there. Before some leave, a late request has begun, and a new one has worked.
    """
    ahead, worked = [MOST, least], set[InstanceId]()

    def scales(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        has_begun = any(view.num_output_tokens >= 3 for view in snapshot.running)
        worked.update(i for batch in snapshot.batches for i in batch.plan.group.instance_ids)
        with_output = {view.request_id for view in snapshot.running if view.num_output_tokens}
        if len(ahead) == 2 and has_begun:
            cluster.scale(ahead.pop(0))
        if len(ahead) == 1 and len(snapshot.pools) < MOST:
            return IterationPlan()
        if len(ahead) == 1 and max(worked, default=0) >= FIRST and not late_ids.isdisjoint(with_output):
            cluster.scale(ahead.pop())
        return policy(snapshot, cost_model)

    return scales


@pytest.mark.parametrize("name", ["esp", "static-sp"])
@pytest.mark.parametrize("has_room", [True, False])
def test_only_kv_on_an_instance_that_leaves_moves_or_is_computed_again(
    changing: Cluster, folder: Path, name: str, has_room: bool
) -> None:
    elastic = make_policy(name, PolicyConfig(lease_steps=4))
    num_prompt, num_output = 96, 12
    request = greedy_request(random_prompt(num_prompt, seed=1), num_output)
    num_more = 4 if has_room else 256 - num_prompt // 2 - 40  # all that is free on the other instance
    other = greedy_request(random_prompt(40, seed=2), 1 + num_more)
    before, placements = changing.snapshot.stats, list[Placement]()

    def policy(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        """Put one request on instance 0 and one on both, and let 1 leave then."""
        for name, group in ((other.request_id, (0,)), (request.request_id, (0, 1))):
            view = snapshot.request.get(name)
            if not placements and view is not None and not view.num_output_tokens:
                return IterationPlan((prefill([view], group),) if view.is_plannable else ())
        if snapshot.batches and not placements:
            return IterationPlan()
        if not placements:
            placements.append(snapshot.request[request.request_id].placement)
            changing.scale(1)
        return (
            elastic(snapshot, cost_model)
            if snapshot.draining_ids or len(snapshot.pools) == 1
            else IterationPlan()
        )

    outputs = changing.run([request, other], policy, timeout=60)
    assert_exact(folder, [request, other], outputs)
    changing.wait_until(lambda snapshot: len(snapshot.instances) == 1)
    stats = changing.snapshot.stats
    num_leaving = placements[0].tokens_by_instance()[1]
    assert num_leaving == num_prompt // 2
    moved_and_again = (
        stats.num_migrated_tokens - before.num_migrated_tokens,
        stats.num_recomputed_tokens - before.num_recomputed_tokens,
    )
    assert moved_and_again == ((num_leaving, 0) if has_room else (0, num_leaving))
    num_needed = num_prompt + num_output - 1 + 40 + num_more
    assert stats.num_computed_tokens - before.num_computed_tokens == num_needed + moved_and_again[1]
    assert stats.num_preemptions == before.num_preemptions
    changing.scale(FIRST)
    changing.wait_until(lambda snapshot: len(snapshot.pools) == FIRST)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("esp", 1),
        ("replicas", 1),
        ("static-sp", 1),
        ("esp", 2),
        ("esp-disaggregated-1", 2),
        ("esp-fixed-2", 2),
    ],
)
def test_no_token_is_lost_or_changed_when_instances_join_and_leave(
    changing: Cluster, folder: Path, name: str, least: int
) -> None:
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=32, chunk_tokens=16, lease_steps=4))
    before = changing.snapshot.stats
    requests = [greedy_request(random_prompt(30 + i, seed=i), NUM_OUTPUT_TOKENS) for i in range(8)]
    late = {request.request_id: After(requests[0].request_id, 5) for request in requests[6:]}
    scaled = scaling(changing, policy, least, frozenset(late))
    outputs = changing.run(requests, scaled, arrivals=late, timeout=60)
    assert_exact(folder, requests, outputs)
    used = {i for one in changing.log if isinstance(one, RunBatch) for i in one.plan.group.instance_ids}
    assert max(used) >= FIRST, "the new instances had no work"
    changing.wait_until(lambda snapshot: len(snapshot.instances) == least)
    stats = changing.snapshot.stats
    assert (stats.num_joins, stats.num_leaves) == (
        before.num_joins + MOST - FIRST,
        before.num_leaves + MOST - least,
    )
    assert stats.num_losses == before.num_losses == 0
    changing.scale(FIRST)
    changing.wait_until(lambda snapshot: len(snapshot.pools) == FIRST)
