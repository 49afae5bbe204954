"""A request may be preempted or aborted at any moment; its neighbours do not notice."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
from cluster import Cluster
from plans import in_group, move, plannable
from requests_for_tests import assert_exact, expected, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.events import RequestAborted
from loong.core.instructions import ReleaseKV
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import Request, RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.policy import Policy

CHUNK, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 9, 36, 6
NUM_STEPS = NUM_PROMPT_TOKENS // CHUNK + NUM_OUTPUT_TOKENS - 1


def three_requests() -> tuple[Request, Request, Request]:
    """Return a request that is interrupted, and two that are in the same batches."""
    prompts = (random_prompt(length, seed=length) for length in (NUM_PROMPT_TOKENS, 50, 4))
    first, second, third = (greedy_request(prompt, NUM_OUTPUT_TOKENS) for prompt in prompts)
    return first, second, third


def preempting(request_id: RequestId, steps: Collection[int], group: Sequence[InstanceId]) -> Policy:
    """Run all in one group, but preempt a request after each of some numbers of steps, once each."""
    left, step_by_step = set(steps), in_group(*group, chunk=CHUNK)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for view in plannable(snapshot):
            num_chunks = min(view.num_computed_tokens, NUM_PROMPT_TOKENS) // CHUNK
            step = num_chunks + max(0, view.num_output_tokens - 1)
            if view.request_id == request_id and view.placement.segments and step in left:
                left.remove(step)
                return IterationPlan(preemptions=(Preemption(request_id),))
        return step_by_step(snapshot, cost_model)

    return policy


@pytest.mark.parametrize("steps", [(1,), (4,), (NUM_STEPS - 1,), range(1, NUM_STEPS)])
def test_a_preempted_request_is_computed_again_and_goes_on(
    any_cluster: Cluster, folder: Path, steps: Collection[int]
) -> None:
    requests = three_requests()
    request_id = requests[0].request_id
    outputs = any_cluster.run(requests, preempting(request_id, steps, any_cluster.full_ids[-3:]))
    assert_exact(folder, requests, outputs)
    releases = [t for t in any_cluster.log if isinstance(t, ReleaseKV) and t.owner_id == request_id]
    assert len(releases) == len(steps) + 1


def test_a_plan_that_only_preempts_the_only_request_is_followed_by_another(
    any_cluster: Cluster, folder: Path
) -> None:
    """Nothing is in flight then, so no event would ask for it."""
    request, *_ = three_requests()
    policy = preempting(request.request_id, range(1, NUM_STEPS), any_cluster.full_ids[-3:])
    outputs = any_cluster.run([request], policy)
    assert_exact(folder, [request], outputs)


def while_queued(view: RequestView, plan: IterationPlan) -> IterationPlan | None:
    return IterationPlan() if not view.placement.segments else None


def in_a_chunk(view: RequestView, plan: IterationPlan) -> IterationPlan | None:
    return plan if plan.batches and view.num_computed_tokens == CHUNK else None


def between_chunks(view: RequestView, plan: IterationPlan) -> IterationPlan | None:
    return IterationPlan() if plan.batches and view.num_computed_tokens == 2 * CHUNK else None


def in_a_lease(view: RequestView, plan: IterationPlan) -> IterationPlan | None:
    return plan if plan.batches and plan.batches[0].num_steps > 1 else None


def in_a_migration(view: RequestView, plan: IterationPlan) -> IterationPlan | None:
    if not (view.is_plannable and view.placement.segments):
        return None
    first_id, *_, last_id = view.placement.instance_ids
    return IterationPlan(migrations=move(view, first_id, last_id))


@pytest.mark.parametrize("moment", [while_queued, in_a_chunk, between_chunks, in_a_lease, in_a_migration])
def test_an_aborted_request_is_gone_and_its_neighbours_go_on(
    any_cluster: Cluster, folder: Path, moment: Callable[[RequestView, IterationPlan], IterationPlan | None]
) -> None:
    victim, *others = three_requests()
    run_all = in_group(*any_cluster.full_ids[-3:], chunk=CHUNK, num_steps=3)
    is_aborted = False

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        """Run all in one group; at the moment, do what it says and let the victim's client go."""
        nonlocal is_aborted
        plan = run_all(snapshot, cost_model)
        view = snapshot.request.get(victim.request_id)
        if is_aborted or view is None or (changed := moment(view, plan)) is None:
            return plan
        is_aborted = True
        any_cluster.abort(victim.request_id)
        return changed

    outputs = any_cluster.run([victim, *others], policy)
    assert_exact(folder, others, outputs)
    produced = outputs[victim.request_id]
    tokens, _ = expected(folder, victim.prompt_token_ids, NUM_OUTPUT_TOKENS)
    assert [token.token_id for token in produced] == tokens[: len(produced)]
    assert len(produced) < NUM_OUTPUT_TOKENS
    (aborted,) = (reported for reported in any_cluster.log if isinstance(reported, RequestAborted))
    assert aborted.request_id == victim.request_id
