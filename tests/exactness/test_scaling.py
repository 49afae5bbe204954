"""A group may gain and lose instances at any step of a request, prefill or decode."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from cluster import Cluster
from plans import decode, move, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.policy import Policy

CHUNK, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 9, 36, 6
NUM_CHUNKS = NUM_PROMPT_TOKENS // CHUNK
NUM_STEPS = NUM_CHUNKS + NUM_OUTPUT_TOKENS - 1
Group: TypeAlias = tuple[InstanceId, ...]
StepPlan: TypeAlias = Callable[[RequestView, int], IterationPlan]


def by_step(plan: StepPlan) -> Policy:
    """Return a policy for one request by the number of steps it has taken."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for view in plannable(snapshot):
            num_chunks = view.num_computed_tokens // CHUNK
            return plan(view, NUM_CHUNKS + view.num_output_tokens - 1 if view.is_decoding else num_chunks)
        return IterationPlan()

    return policy


def one_step(
    view: RequestView, group: Group, master_id: InstanceId, keep_on: Group | None = None
) -> IterationPlan:
    """Return a chunk that stays on `keep_on`, or a decode token with this master."""
    batch: BatchPlan
    if view.is_decoding:
        batch = decode([view], group, {view.request_id: master_id})
    else:
        batch = prefill([view], group, num_tokens=CHUNK, keep_on=keep_on)
    return IterationPlan((batch,))


def groups_of(cluster: Cluster) -> list[Group]:
    """Return the groups that ran, in order."""
    return [reported.plan.group.instance_ids for reported in cluster.log if isinstance(reported, RunBatch)]


def run_one(cluster: Cluster, folder: Path, plan: StepPlan) -> None:
    """One request, exact, in as many batches as it has steps."""
    request = greedy_request(random_prompt(NUM_PROMPT_TOKENS, seed=4), NUM_OUTPUT_TOKENS)
    assert_exact(folder, [request], cluster.run([request], by_step(plan)))
    assert len(groups_of(cluster)) == NUM_STEPS


@pytest.mark.parametrize("when", [1, NUM_CHUNKS - 1, NUM_CHUNKS, NUM_CHUNKS + 1, NUM_STEPS - 1])
def test_an_instance_that_held_nothing_joins_as_master(cluster: Cluster, folder: Path, when: int) -> None:
    def plan(view: RequestView, step: int) -> IterationPlan:
        return one_step(view, (2, 0), 0) if step < when else one_step(view, (3, 2, 0), 3)

    run_one(cluster, folder, plan)
    assert groups_of(cluster) == [(2, 0)] * when + [(3, 2, 0)] * (NUM_STEPS - when)


@pytest.mark.parametrize("when", [1, NUM_CHUNKS - 1, NUM_CHUNKS])
@pytest.mark.parametrize("keepers", [(2,), (3, 1, 0)])
def test_a_group_shrinks_to_the_instances_that_retained_all_kv(
    cluster: Cluster, folder: Path, keepers: Group, when: int
) -> None:
    def plan(view: RequestView, step: int) -> IterationPlan:
        group = (1, 2, 0, 3) if step < when else keepers
        return one_step(view, group, keepers[0], keepers)

    run_one(cluster, folder, plan)
    assert groups_of(cluster)[when:] == [keepers] * (NUM_STEPS - when)


@pytest.mark.parametrize("when", [1, NUM_CHUNKS - 1, NUM_CHUNKS, NUM_CHUNKS + 1, NUM_STEPS - 1])
def test_a_group_shrinks_when_the_kv_of_an_instance_has_moved_away(
    cluster: Cluster, folder: Path, when: int
) -> None:
    """Instance 1, which was master and holds KV, gives all of it to the two that go on."""

    def plan(view: RequestView, step: int) -> IterationPlan:
        if step < when:
            return one_step(view, (1, 3, 2), 1)
        held = move(view, 1, 3)
        return IterationPlan(migrations=held) if held else one_step(view, (3, 2), 2)

    run_one(cluster, folder, plan)
    assert groups_of(cluster) == [(1, 3, 2)] * when + [(3, 2)] * (NUM_STEPS - when)


def test_a_request_may_change_its_whole_group_at_every_step(cluster: Cluster, folder: Path) -> None:
    """Each step is on one instance, and everything is moved to the next before the next step."""

    def plan(view: RequestView, step: int) -> IterationPlan:
        here = (step % 4,)
        away = tuple(m for i in view.placement.instance_ids if i not in here for m in move(view, i, *here))
        return IterationPlan(migrations=away) if away else one_step(view, here, *here)

    run_one(cluster, folder, plan)
