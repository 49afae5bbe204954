"""The master of a decode token decides where its work is done, and nothing else."""

from pathlib import Path

import pytest
from cluster import Cluster
from covering import pairwise
from plans import both, decode, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.policy import Policy

GROUP = (2, 1)
PLACES = ((1,), (2,), (1, 2))


def two_requests(
    places: tuple[tuple[InstanceId, ...], ...], masters: tuple[InstanceId, ...], num_steps: int
) -> Policy:
    """Prefill both at once, each kept on its places; decode both at once, each with its master."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        views = plannable(snapshot)
        if len(views) < 2:
            return IterationPlan()
        if views[0].is_decoding:
            named = {view.request_id: i for view, i in zip(views, masters, strict=True)}
            return IterationPlan((decode(views, GROUP, named, num_steps=num_steps),))
        first, second = (prefill([v], GROUP, keep_on=p) for v, p in zip(views, places, strict=True))
        return IterationPlan((both(first, second),))

    return policy


@pytest.mark.parametrize(
    ("first", "second", "first_place", "second_place", "num_steps"),
    pairwise(GROUP, GROUP, PLACES, PLACES, [1, 5]),
)
def test_any_assignment_of_masters_is_exact_wherever_the_kv_is(
    cluster: Cluster,
    folder: Path,
    first: InstanceId,
    second: InstanceId,
    first_place: tuple[InstanceId, ...],
    second_place: tuple[InstanceId, ...],
    num_steps: int,
) -> None:
    policy = two_requests((first_place, second_place), (first, second), num_steps)
    requests = [greedy_request(random_prompt(length, seed=length), 6) for length in (26, 9)]
    assert_exact(folder, requests, cluster.run(requests, policy))
