"""KV outside a batch's group is attended where it is, while its instance runs other batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import After, Cluster
from leak_checks import shared_cluster
from machines import H200_GRAPH_LIMITS
from plans import decode, move, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt
from true_stories import assert_true

from loong.core.cost.cost_model import CostModel
from loong.core.events import BatchFinished
from loong.core.instructions import MoveKV, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, Preemption, Transfer
from loong.core.request import Request, RequestView
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import Policy, make_policy

LENGTHS = (26, 9, 40)
NUM_TOKENS = 10
Plan = Callable[[RequestView], BatchPlan]


def each_by_itself(plan: Plan) -> Policy:
    """Plan every request by itself, as soon as its instances are idle."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        idle = {i.instance_id for i in snapshot.instances if i.is_idle}
        batches = []
        for view in plannable(snapshot):
            batch = plan(view)
            if idle.issuperset(batch.group.instance_ids):
                idle.difference_update(batch.group.instance_ids)
                batches.append(batch)
        return IterationPlan(tuple(batches))

    return policy


def served_batches(cluster: Cluster) -> list[RunBatch]:
    return [item for item in cluster.log if isinstance(item, RunBatch) and item.holder_ids]


def three_requests() -> list[Request]:
    return [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in LENGTHS]


@pytest.fixture(scope="module")
def on_gpus(folder: Path) -> Iterator[Cluster]:
    """Yield two instances on GPUs of their own."""
    config = ClusterConfig(
        str(folder), num_instances=2, kv_capacity=400, device="cuda", graph_limits=H200_GRAPH_LIMITS
    )
    with shared_cluster(config) as running:
        yield running


@pytest.fixture(params=["cluster", "sharded", pytest.param("on_gpus", marks=pytest.mark.multigpu)])
def serving(request: pytest.FixtureRequest) -> Cluster:
    """Return each of these."""
    found: Cluster = request.getfixturevalue(request.param)
    return found


def members(cluster: Cluster) -> tuple[InstanceId, InstanceId]:
    """Return one instance that prefills, and one that decodes."""
    return cluster.full_ids[0], cluster.full_ids[-1]


@pytest.mark.parametrize("num_steps", [1, 4, 16])
def test_decodes_read_kv_where_it_was_computed(serving: Cluster, folder: Path, num_steps: int) -> None:
    first_id, last_id = members(serving)

    def plan(view: RequestView) -> BatchPlan:
        if view.is_decoding:
            return decode([view], (last_id,), {view.request_id: last_id}, num_steps=num_steps)
        return prefill([view], (first_id,), num_tokens=13, transfer=Transfer.QUERY)

    requests = three_requests()
    assert_exact(folder, requests, serving.run(requests, each_by_itself(plan)))
    served = served_batches(serving)
    assert {run.holder_ids for run in served} == {(first_id,)}
    assert all(run.plan.group.instance_ids == (last_id,) for run in served)


@pytest.mark.parametrize("num_steps", [1, NUM_TOKENS])
def test_a_holder_computes_its_own_chunks_while_it_serves(
    serving: Cluster, folder: Path, num_steps: int
) -> None:
    _, last_id = members(serving)

    def plan(view: RequestView) -> BatchPlan:
        if view.is_decoding:
            return decode([view], (last_id,), {view.request_id: last_id}, num_steps=num_steps)
        return prefill([view], (0,), num_tokens=2, transfer=Transfer.QUERY)

    requests = three_requests()
    assert_exact(folder, requests, serving.run(requests, each_by_itself(plan)))
    served = {run.batch_id for run in served_batches(serving)}
    running: set[int] = set()
    meanwhile = list[RunBatch]()
    for item in serving.log:
        if isinstance(item, RunBatch) and item.batch_id in served:
            running.add(item.batch_id)
        elif isinstance(item, RunBatch) and running:
            meanwhile.append(item)
        elif isinstance(item, BatchFinished):
            running.discard(item.batch_id)
    assert meanwhile, "the holder got no chunk of its own while it served"
    assert {run.plan.group.instance_ids for run in meanwhile} == {(0,)}


def test_chunks_of_two_instances_meet_the_kv_of_each_other_at_once(serving: Cluster, folder: Path) -> None:
    ids = members(serving)

    def plan(view: RequestView) -> BatchPlan:
        turn = view.num_prompt_tokens % 2
        if view.is_decoding:
            return decode([view], (ids[turn],), {view.request_id: ids[turn]}, num_steps=1)
        group = (ids[(turn + view.num_computed_tokens // 5) % 2],)
        return prefill([view], group, num_tokens=5, transfer=Transfer.QUERY)

    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in (42, 41, 37, 26)]
    assert_exact(folder, requests, serving.run(requests, each_by_itself(plan)))
    assert {run.holder_ids for run in served_batches(serving)} == {(i,) for i in ids}


@pytest.mark.parametrize("group", [(1,), (3, 2), (2, 3, 0)])
def test_chunks_send_their_queries_to_a_history_elsewhere(
    cluster: Cluster, folder: Path, group: tuple[InstanceId, ...]
) -> None:
    def plan(view: RequestView) -> BatchPlan:
        if view.num_computed_tokens == 0:
            return prefill([view], (0, 1), num_tokens=11)
        if view.num_uncomputed_tokens > 1 or not view.is_decoding:
            return prefill([view], group, num_tokens=7, transfer=Transfer.QUERY)
        return decode([view], group[:1], {view.request_id: group[0]}, num_steps=3)

    requests = three_requests()
    assert_exact(folder, requests, cluster.run(requests, each_by_itself(plan)))
    assert any(run.plan.num_steps == 1 and run.holder_ids for run in served_batches(cluster))


def test_several_groups_read_one_segment_at_once(cluster: Cluster, folder: Path) -> None:
    """Choices of one prompt are decoded on instances of their own, over KV that one instance has of all."""
    prompt = random_prompt(37, seed=37)
    request = replace(greedy_request(prompt, NUM_TOKENS), num_choices=3)

    def plan(view: RequestView) -> BatchPlan:
        if not view.is_decoding:
            return prefill([view], (0,), num_tokens=20, transfer=Transfer.QUERY)
        master_id = 1 + [choice.request_id for choice in request.choices()].index(view.request_id)
        return decode([view], (master_id,), {view.request_id: master_id}, num_steps=4)

    outputs = cluster.run([request], each_by_itself(plan))
    assert_exact(folder, [replace(c, num_choices=1) for c in request.choices()], outputs)
    served = served_batches(cluster)
    assert {run.plan.group.instance_ids for run in served} == {(1,), (2,), (3,)}
    assert {run.holder_ids for run in served} == {(0,)}


def test_siblings_begin_with_kv_of_their_prompt_that_lies_outside_its_last_group(
    cluster: Cluster, folder: Path
) -> None:
    request = replace(greedy_request(random_prompt(30, seed=30), NUM_TOKENS), num_choices=2)

    def plan(view: RequestView) -> BatchPlan:
        if view.num_computed_tokens == 0:
            return prefill([view], (2,), num_tokens=20, transfer=Transfer.QUERY)
        if not view.is_decoding:
            return prefill([view], (1,), transfer=Transfer.QUERY)
        return decode([view], (3,), {view.request_id: 3}, num_steps=2)

    outputs = cluster.run([request], each_by_itself(plan))
    assert_exact(folder, list(request.choices()), outputs)
    assert {run.holder_ids for run in served_batches(cluster)} == {(2,), (1, 2)}


def test_what_a_holder_runs_itself_may_be_preempted_while_it_serves(serving: Cluster, folder: Path) -> None:
    """A request of the holder loses its KV between its chunks, while the lease is served."""
    _, last_id = members(serving)
    served, victim = three_requests()[0], greedy_request(random_prompt(40, seed=40), 3)
    num_preempted = 0

    def plan(view: RequestView) -> BatchPlan:
        if view.is_decoding and view.request_id == served.request_id:
            return decode([view], (last_id,), {view.request_id: last_id}, num_steps=NUM_TOKENS)
        return prefill([view], (0,), num_tokens=3, transfer=Transfer.QUERY)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal num_preempted
        view = snapshot.request.get(victim.request_id)
        is_serving = any(batch.holder_ids for batch in snapshot.batches)
        is_there = view is not None and view.is_plannable and view.num_computed_tokens >= 3
        if is_there and is_serving and num_preempted < 3:
            num_preempted += 1
            return IterationPlan(preemptions=(Preemption(victim.request_id),))
        return each_by_itself(plan)(snapshot, cost_model)

    assert_exact(folder, [served, victim], serving.run([served, victim], policy))
    assert num_preempted


@pytest.mark.parametrize("transfer", list(Transfer))
def test_new_kv_is_pushed_to_where_it_is_decoded(serving: Cluster, folder: Path, transfer: Transfer) -> None:
    """All chunks push their KV to another instance; later ones meet it there by their queries."""
    first_id, last_id = members(serving)

    def plan(view: RequestView) -> BatchPlan:
        if view.is_decoding:
            return decode([view], (last_id,), {view.request_id: last_id}, num_steps=4)
        moved = Transfer.QUERY if view.num_computed_tokens else transfer
        return prefill([view], (first_id,), num_tokens=13, keep_on=(last_id,), transfer=moved)

    requests = three_requests()
    assert_exact(folder, requests, serving.run(requests, each_by_itself(plan)))
    served = served_batches(serving)
    assert {(run.plan.group.instance_ids, run.holder_ids) for run in served} == {((first_id,), (last_id,))}
    assert len(served) == sum(-(-length // 13) for length in LENGTHS)


def test_a_ring_pushes_parts_of_its_stripes_to_several_instances(cluster: Cluster, folder: Path) -> None:
    def plan(view: RequestView) -> BatchPlan:
        if view.is_decoding:
            return decode([view], (3, 0), {view.request_id: 3}, num_steps=3)
        return prefill([view], (1, 2), keep_on=(3, 2, 0))

    requests = three_requests()
    assert_exact(folder, requests, cluster.run(requests, each_by_itself(plan)))
    assert {run.holder_ids for run in served_batches(cluster)} == {(0, 3), (2,)}


@pytest.mark.parametrize("name", ["esp", "esp-no-proactive"])
def test_a_policy_that_decodes_where_kv_is_read_from_others_or_pushed_gives_exact_tokens(
    serving: Cluster, folder: Path, name: str
) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in (52, *LENGTHS)]
    anchor, *late = requests
    arrivals = {request.request_id: After(anchor.request_id, 1 + n) for n, request in enumerate(late)}
    config = PolicyConfig(max_num_batched_tokens=8, lease_steps=4, target_tpot=1e-4)
    outputs = serving.run(requests, make_policy(name, config), arrivals=arrivals)
    assert_exact(folder, requests, outputs)
    plans = [run.plan for run in served_batches(serving)]
    assert any(plan.pushes for plan in plans) == (name == "esp")
    assert any(not plan.pushes for plan in plans) or name == "esp"
    assert_true(serving.lines, serving.history)


def test_prompts_that_push_kv_to_instances_that_lend_room_give_exact_tokens(
    cluster: Cluster, folder: Path
) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in (230, *LENGTHS)]
    outputs = cluster.run(requests, make_policy("infinite", PolicyConfig(lease_steps=4)))
    assert_exact(folder, requests, outputs)
    runs = [item for item in cluster.log if isinstance(item, RunBatch)]
    assert all(run.plan.group.dop == 1 for run in runs)
    assert any(run.plan.pushes for run in runs)
    assert any(run.holder_ids and run.plan.num_steps > 1 for run in runs)
    assert_true(cluster.lines, cluster.history)


@pytest.mark.parametrize("name", ["infinite-paper", "distkv"])
def test_kv_that_is_lent_while_it_is_read_gives_exact_tokens(
    cluster: Cluster, folder: Path, name: str
) -> None:
    """Reading KV is said to take most of a step, and requests find room on no instance alone."""
    lending, cost_model = make_policy(name, PolicyConfig()), WorkCostModel(Coefficients(decode_key=1e-3))
    requests = [greedy_request(random_prompt(length, seed=length), 40) for length in (70, 71, 30, 31, 90, 60)]
    outputs = cluster.run(requests, lambda snapshot, _: lending(snapshot, cost_model))
    assert_exact(folder, requests, outputs)
    moves = [item for item in cluster.log if isinstance(item, MoveKV)]
    assert moves
    assert all(item.during_batch_id is not None for item in moves)
    assert_true(cluster.lines, cluster.history)


@pytest.mark.parametrize("destination", [1, 2])
def test_kv_migrates_under_the_lease_that_reads_it(cluster: Cluster, folder: Path, destination: int) -> None:
    """KV on instance 0 goes to the master itself, or to another holder that the next lease reads."""
    served, other = greedy_request(random_prompt(26, seed=26), 60), three_requests()[2]

    def plan(view: RequestView) -> BatchPlan:
        if view.request_id == other.request_id:  # whose many batches call the policy while the lease runs
            return prefill([view], (3,), num_tokens=1)
        if view.is_decoding:
            return decode([view], (1,), {view.request_id: 1}, num_steps=30)
        return prefill([view], (0,), num_tokens=20, transfer=Transfer.QUERY)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        view = snapshot.request.get(served.request_id)
        is_leased = view is not None and view.is_copyable and any(b.holder_ids for b in snapshot.batches)
        migrations = () if view is None or not is_leased else move(view, 0, destination)
        return replace(each_by_itself(plan)(snapshot, cost_model), migrations=migrations)

    assert_exact(folder, [served, other], cluster.run([served, other], policy))
    moves = [item for item in cluster.log if isinstance(item, MoveKV)]
    assert moves
    assert all(item.during_batch_id is not None for item in moves)


@pytest.mark.parametrize("keeper", [1, 3])
def test_kv_of_the_first_chunk_migrates_under_the_last_one_whose_kv_is_kept_or_pushed(
    cluster: Cluster, folder: Path, keeper: int
) -> None:
    """Instance 1 is in the group, and 3 is not. The end of the first chunk is predicted when it begins."""
    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in (90, 61)]

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        idle = {i.instance_id for i in snapshot.instances if i.is_idle}
        for view in plannable(snapshot):
            if view.is_decoding and keeper in idle:
                return IterationPlan((decode([view], (keeper,), {view.request_id: keeper}, num_steps=4),))
            if not view.is_decoding and idle.issuperset((0, 1)):
                if view.num_uncomputed_tokens > 30:
                    first = prefill([view], (0, 1), num_tokens=view.num_uncomputed_tokens - 30)
                    return IterationPlan((replace(first, predicted_time=1e-4),))
                moves = [m for i in (0, 1) if i != keeper for m in move(view, i, keeper)]
                return IterationPlan((prefill([view], (0, 1), keep_on=(keeper,)),), tuple(moves))
        return IterationPlan()

    assert_exact(folder, requests, cluster.run(requests, policy))
    moves = [item for item in cluster.log if isinstance(item, MoveKV)]
    assert len(moves) == len(requests) * (1 if keeper == 1 else 2)
    assert all(item.during_batch_id is not None for item in moves)
    leases = [item for item in cluster.log if isinstance(item, RunBatch) and item.plan.num_steps > 1]
    assert leases
    assert not any(item.holder_ids for item in leases), "all KV is where the request decodes"
    assert_true(cluster.lines, cluster.history)
