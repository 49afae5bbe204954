"""Only the KV that lost instances held is computed again, and tokens are those of an undisturbed run."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from child_processes import own_forked
from cluster import Cluster
from leak_checks import shared_cluster
from plans import decode
from requests_for_tests import (
    assert_exact,
    assert_prompt_exact,
    greedy_request,
    random_prompt,
    scored_request,
)

from loong.core.cost.cost_model import CostModel
from loong.core.events import InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.request import Request, RequestView
from loong.core.snapshot import Snapshot
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.common.striping import batch_of, retained_part, striped_part

NUM_INSTANCES = 4
NUM_PROMPT, NUM_OUTPUT = 96, 12
CHUNK = 32
WORKER = "loong.worker.process"
AT_ONCE = Backoff(first=0.0, longest=0.0, max_failures=1000)
Plan = Callable[[RequestView, tuple[InstanceId, ...]], BatchPlan]


class Killer:
    """A cluster that starts lost instances again, and a policy that kills some of its workers once."""

    def __init__(self, cluster: Cluster, others: frozenset[int]) -> None:
        """Take the workers of other clusters, to spare them."""
        self.cluster, self._others = cluster, others
        self.placement: Placement | None = None  # when workers were killed

    def run(self, request: Request, plan: Plan, when: Callable[[RequestView], bool], *numbers: int) -> None:
        """Run a request by `plan`, and kill workers of these numbers just before the first batch `when`."""
        before, self.placement = self.cluster.snapshot.stats, None

        def policy(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
            views = [view for view in (*snapshot.waiting, *snapshot.running) if view.is_plannable]
            if not views or not snapshot.pools:
                return IterationPlan()
            if self.placement is None and when(views[0]):
                self.placement = views[0].placement
                pids = own_forked(WORKER, self._others)
                for number in numbers:
                    os.kill(pids[number], signal.SIGKILL)
            return IterationPlan((plan(views[0], tuple(sorted(snapshot.pools))),))

        self.outputs = self.cluster.run([request], policy, timeout=60)
        self.cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + len(numbers))
        stats = self.cluster.snapshot.stats
        self.num_computed = stats.num_computed_tokens - before.num_computed_tokens
        self.num_recomputed = stats.num_recomputed_tokens - before.num_recomputed_tokens

    @property
    def lost(self) -> set[int]:
        """The positions whose KV was lost in this run."""
        assert self.placement is not None, "no worker was killed"
        lost_ids = [event.instance_id for event in self.cluster.log if isinstance(event, InstanceLost)]
        return {*chain.from_iterable(p for i in lost_ids for p in self.placement.on(i))}

    def assert_only_lost_positions_are_recomputed(self, folder: Path, request: Request) -> None:
        assert_exact(folder, [request], self.outputs)
        assert self.lost
        assert self.num_recomputed == len(self.lost)
        assert self.num_computed == NUM_PROMPT + NUM_OUTPUT - 1 + len(self.lost)

    @property
    def repairs(self) -> list[RunBatch]:
        """The batches of requests that had holes."""
        runs = [item for item in self.cluster.log if isinstance(item, RunBatch)]
        return [run for run in runs if any(given.placement.has_holes for given in run.inputs)]


@pytest.fixture(scope="module")
def killer(folder: Path) -> Iterator[Killer]:
    others = frozenset(own_forked(WORKER))
    config = ClusterConfig(str(folder), num_instances=NUM_INSTANCES, kv_capacity=256)
    with shared_cluster(config, backoff=AT_ONCE) as cluster:
        yield Killer(cluster, others)


def the_request() -> Request:
    return greedy_request(random_prompt(NUM_PROMPT, seed=7), NUM_OUTPUT)


def in_stripes(transfer: Transfer, num_tokens: int = CHUNK) -> Plan:
    """Return plans of the first missing positions, striped over all instances that are there."""

    def plan(view: RequestView, alive: tuple[InstanceId, ...]) -> BatchPlan:
        group, count = ESPGroup(alive), min(num_tokens, view.num_uncomputed_tokens)
        return batch_of(group, [striped_part(view, count, group, transfer)])

    return plan


def retained(view: RequestView, alive: tuple[InstanceId, ...]) -> BatchPlan:
    """Plan as above, but keep KV on the last two instances, unless it is elsewhere already."""
    group, count = ESPGroup(alive), min(CHUNK, view.num_uncomputed_tokens)
    return batch_of(group, [retained_part(view, count, group, {i: 100 + i for i in alive[-2:]})])


def after(num_computed: int) -> Callable[[RequestView], bool]:
    return lambda view: view.num_computed_tokens >= num_computed


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("numbers", [(0,), (3,), (1, 2)])
def test_members_lost_in_a_prefill_cost_their_stripes_alone(
    killer: Killer, folder: Path, transfer: Transfer, numbers: tuple[int, ...]
) -> None:
    request = the_request()
    killer.run(request, in_stripes(transfer), after(2 * CHUNK), *numbers)
    killer.assert_only_lost_positions_are_recomputed(folder, request)
    assert len(killer.lost) == 2 * CHUNK * len(numbers) // NUM_INSTANCES
    first = killer.repairs[0]
    assert {p for block in first.plan.queries for p in block.positions} >= set(sorted(killer.lost)[:CHUNK])
    assert [given.sampling_params for given in first.inputs] == [None]


@pytest.mark.parametrize("number", [2, 3])
def test_a_repair_can_leave_its_kv_on_fewer_instances(killer: Killer, folder: Path, number: int) -> None:
    request = the_request()
    killer.run(request, retained, after(2 * CHUNK), number)
    assert_exact(folder, [request], killer.outputs)
    assert killer.num_recomputed == len(killer.lost)


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("is_served", [False, True])
def test_a_member_or_a_holder_lost_in_a_decode_costs_what_it_held(
    killer: Killer, folder: Path, num_steps: int, is_served: bool
) -> None:
    repairs = in_stripes(Transfer.QUERY, NUM_PROMPT)

    def plan(view: RequestView, alive: tuple[InstanceId, ...]) -> BatchPlan:
        if not view.is_decoding:
            return repairs(view, alive)
        group = alive[-1:] if is_served else alive
        return decode([view], group, {view.request_id: alive[-1]}, num_steps=num_steps)

    request = the_request()
    killer.run(request, plan, lambda view: view.num_output_tokens >= 4, 0)
    killer.assert_only_lost_positions_are_recomputed(folder, request)
    assert len(killer.lost) < NUM_PROMPT // NUM_INSTANCES + NUM_OUTPUT


def test_the_loss_of_all_instances_costs_everything(killer: Killer, folder: Path) -> None:
    request = the_request()
    killer.run(request, in_stripes(Transfer.KV), after(CHUNK), *range(NUM_INSTANCES))
    killer.assert_only_lost_positions_are_recomputed(folder, request)
    assert killer.lost == {*range(CHUNK)}


def test_prompts_are_scored_as_a_whole_whatever_is_lost(killer: Killer, folder: Path) -> None:
    request = scored_request(NUM_PROMPT, 3)
    killer.run(request, in_stripes(Transfer.KV), after(2 * CHUNK), 1)
    assert_prompt_exact(folder, request, killer.cluster.prompt_logprobs[request.request_id])
