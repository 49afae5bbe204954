"""Many steps on one plan: no token is lost or repeated, for every way that a lease ends."""

from pathlib import Path

import pytest
from cluster import After, Cluster
from plans import in_group
from requests_for_tests import assert_exact, expected, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.events import BatchFinished, TokensProduced
from loong.core.instructions import ExtendLease, RunBatch, StopLease
from loong.core.plan import IterationPlan, LeaseEnd
from loong.core.request import FinishReason
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

PROMPTS = tuple(random_prompt(length, seed=length) for length in (21, 8, 33))


def leases(cluster: Cluster) -> list[tuple[RunBatch, int, int]]:
    """Return the decode batches, with the steps whose tokens were reported and the number that each took."""
    reported = [
        what for what in cluster.log if isinstance(what, RunBatch) and what.inputs[0].num_output_tokens
    ]
    taken = {what.batch_id: what.num_steps for what in cluster.log if isinstance(what, BatchFinished)}
    steps = {what.batch_id: what.step + 1 for what in cluster.log if isinstance(what, TokensProduced)}
    return [(batch, steps[batch.batch_id], taken[batch.batch_id]) for batch in reported]


@pytest.mark.parametrize("lengths", [(9, 9, 9), (2, 6, 10), (10, 3, 3)])
@pytest.mark.parametrize("dop", [1, 3, 4])
def test_a_group_takes_all_steps_by_itself_while_requests_end(
    cluster: Cluster, folder: Path, dop: int, lengths: tuple[int, ...]
) -> None:
    requests = [greedy_request(prompt, count) for prompt, count in zip(PROMPTS, lengths, strict=True)]
    assert_exact(folder, requests, cluster.run(requests, in_group(*range(dop), num_steps=20)))
    ((_, num_reported, num_steps),) = leases(cluster)
    assert num_reported == num_steps == max(lengths) - 1


def test_a_request_that_draws_a_stop_token_leaves_its_lease(any_cluster: Cluster, folder: Path) -> None:
    tokens, _ = expected(folder, PROMPTS[0], 9)
    stop_id = tokens[4]
    stopping = greedy_request(PROMPTS[0], 9, stop_token_ids=(stop_id,))
    others = [greedy_request(prompt, 9) for prompt in PROMPTS[1:]]
    outputs = any_cluster.run([stopping, *others], in_group(*any_cluster.full_ids[::-1], num_steps=20))
    assert_exact(folder, others, outputs)
    produced = outputs[stopping.request_id]
    assert [token.token_id for token in produced] == tokens[: tokens.index(stop_id) + 1]
    assert produced[-1].finish_reason is FinishReason.STOP
    assert [num_steps for *_, num_steps in leases(any_cluster)] == [8]


@pytest.mark.parametrize("distance", [1, 3, 8])
def test_the_engine_ends_a_lease_at_a_coming_step(any_cluster: Cluster, folder: Path, distance: int) -> None:
    """When another request comes, the lease is to end `distance` steps later, or as soon as it can."""
    ends: list[LeaseEnd] = []
    run_all = in_group(*any_cluster.full_ids[-3:], num_steps=80)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for batch in snapshot.batches:
            last_step = min(batch.num_steps_taken + distance, batch.last_step)
            if snapshot.waiting and batch.plan.num_steps > 1 and batch.num_steps_taken < last_step:
                ends.append(LeaseEnd(batch.batch_id, last_step))
                return IterationPlan(lease_ends=(ends[-1],))
        return run_all(snapshot, cost_model)

    requests = [greedy_request(prompt, 80) for prompt in PROMPTS[:2]]
    late = greedy_request(PROMPTS[2], 6)
    outputs = any_cluster.run(
        [*requests, late], policy, arrivals={late.request_id: After(requests[0].request_id, 4)}
    )
    assert_exact(folder, [*requests, late], outputs)
    assert ends
    for batch, num_reported, num_steps in leases(any_cluster):
        assert num_reported == num_steps
        assert all(num_steps >= end.step for end in ends if end.batch_id == batch.batch_id)


@pytest.mark.parametrize("leaving", [{}, {0: 40}])
def test_a_lease_that_goes_on_is_one_batch_whichever_requests_end_in_it(
    any_cluster: Cluster, folder: Path, leaving: dict[int, int]
) -> None:
    """A long answer is one lease, unless a client leaves; by the policy of a group that never changes."""
    requests = [greedy_request(prompt, count) for prompt, count in zip(PROMPTS, (70, 80, 60), strict=True)]
    policy = make_policy("static-sp", PolicyConfig())
    left = {requests[index].request_id: count for index, count in leaving.items()}
    outputs = any_cluster.run(requests, policy, leaving=left)
    assert_exact(folder, [request for request in requests if request.request_id not in left], outputs)
    taken = [num_steps for *_, num_steps in leases(any_cluster)]
    assert sum(taken) >= 79
    assert len(taken) <= 2 + len(leaving)  # with steps of 16 it would be 5
    extensions = [what for what in any_cluster.log if isinstance(what, ExtendLease)]
    assert len(extensions) >= 2


def test_an_abort_ends_the_lease_that_computes_the_request(any_cluster: Cluster, folder: Path) -> None:
    requests = [greedy_request(prompt, 120) for prompt in PROMPTS]
    leaving = {requests[1].request_id: 3}
    policy = in_group(*any_cluster.full_ids[-3:], num_steps=120)
    outputs = any_cluster.run(requests, policy, leaving=leaving)
    assert_exact(folder, [requests[0], requests[2]], outputs)
    assert len(outputs[requests[1].request_id]) == 3
    (stop,) = (reported for reported in any_cluster.log if isinstance(reported, StopLease))
    (first, _, num_steps), *_ = leases(any_cluster)
    assert stop.batch_id == first.batch_id
    assert num_steps >= stop.step
