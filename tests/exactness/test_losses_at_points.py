"""An instance fails at a chosen point of its work: requests go on, with the tokens of an undisturbed run."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from failing_worker import MESSAGE, MODULE, arm, variables
from families import write_tiny_model
from leak_checks import shared_cluster
from plans import decode, in_group, move, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt
from safetensors.torch import load_file, save_file

from loong.core.cost.cost_model import CostModel
from loong.core.errors import ClusterError
from loong.core.events import InstanceLost, MigrationFinished
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, Transfer
from loong.core.request import FinishReason, Request, RequestId
from loong.core.snapshot import Snapshot
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.processes.fork_server import ForkServer
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy
from loong.scheduler.tuning import MAX_LOSSES
from loong.worker.config import ENVIRONMENT

NUM_INSTANCES, NUM_LAYERS = 3, 3
POISON = 96  # a token whose embedding is not finite, and which is never the likeliest
AT_ONCE = Backoff(first=0.0, longest=0.0, max_failures=1000)
ESP = make_policy("esp", PolicyConfig(max_num_batched_tokens=24, lease_steps=2))
# On a busy machine, the report of a survivor may be known for long before the end of the process is.
KILLED = ("killed by signal 9", " reported: ")
When = Callable[[IterationPlan], bool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model("llama-dynamic", tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    weights["lm_head.weight"][POISON] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("armed")


@pytest.fixture(scope="module")
def cluster(model: Path, armed: Path) -> Iterator[Cluster]:
    environment = {**ENVIRONMENT, **variables(armed)}
    config = ClusterConfig(str(model), num_instances=NUM_INSTANCES, kv_capacity=256)
    with (
        closing(ForkServer(MODULE, environment)) as fork_server,
        shared_cluster(config, backoff=AT_ONCE, fork_server=fork_server) as running,
    ):
        yield running


def requests() -> list[Request]:
    return [greedy_request(random_prompt(30 + 5 * i, seed=i, vocab_size=POISON), 12) for i in range(3)]


class Arming:
    """A policy until an instance is lost, then `esp`. It arms a victim before the first plan `when` says."""

    def __init__(
        self, policy: Policy, when: When, armed: Path, victim: int, point: str, *, raises: bool = False
    ) -> None:
        self._policy, self._when = policy, when
        self._arm: Callable[[], None] = partial(arm, armed, victim, point, raises=raises)
        self._num_losses: int | None = None  # before this run
        self.is_armed = False

    def __call__(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if self._num_losses is None:
            self._num_losses = snapshot.stats.num_losses
        if snapshot.stats.num_losses > self._num_losses:
            return ESP(snapshot, cost_model)
        plan = self._policy(snapshot, cost_model)
        if not self.is_armed and self._when(plan):
            self.is_armed = True
            self._arm()
        return plan


def run_and_lose(cluster: Cluster, model: Path, policy: Policy, victim: int, *reasons: str) -> None:
    """Run requests of which some lose an instance, and wait until it has joined again."""
    before, sent = cluster.snapshot.stats, requests()
    outputs = cluster.run(sent, policy, timeout=90)
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + 1)
    assert_exact(model, sent, outputs)
    losses = [event for event in cluster.log if isinstance(event, InstanceLost)]
    assert [event.instance_id for event in losses] == [victim]
    assert any(reason in losses[0].reason for reason in reasons)
    assert len(cluster.snapshot.instances) == NUM_INSTANCES


def has_second_chunk(plan: IterationPlan) -> bool:
    return any(block.positions.start > 0 for batch in plan.batches for block in batch.queries)


def has_decode(plan: IterationPlan) -> bool:
    return any(len(block.positions) == 1 for batch in plan.batches for block in batch.queries)


def has_migration(plan: IterationPlan) -> bool:
    return bool(plan.migrations)


def computed_twice(cluster: Cluster) -> set[RequestId]:
    """Return the requests of which some position was computed more than once."""
    runs = [item.plan for item in cluster.log if isinstance(item, RunBatch)]
    blocks = [block for plan in runs for block in plan.queries]
    times = Counter((block.request_id, position) for block in blocks for position in block.positions)
    return {request_id for (request_id, _), number in times.items() if number > 1}


def computed_on(cluster: Cluster, instance_id: InstanceId) -> set[RequestId]:
    """Return the requests that batches on an instance computed before it was lost."""
    until = next(n for n, item in enumerate(cluster.log) if isinstance(item, InstanceLost))
    runs = [item.plan for item in cluster.log[:until] if isinstance(item, RunBatch)]
    plans = [plan for plan in runs if instance_id in plan.group.instance_ids]
    return {block.request_id for plan in plans for block in plan.queries}


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_prefills_of_others_go_on_when_an_instance_dies_in_a_prefill_of_its_own(
    cluster: Cluster, model: Path, armed: Path, layer: int
) -> None:
    alone = make_policy("replicas", PolicyConfig(max_num_batched_tokens=12, chunk_tokens=12))
    policy = Arming(alone, has_second_chunk, armed, 1, f"layer {layer}")
    run_and_lose(cluster, model, policy, 1, *KILLED)
    assert computed_twice(cluster) == computed_on(cluster, 1)
    assert len(computed_on(cluster, 1)) == 1


def test_nobody_loses_anything_when_an_idle_instance_dies(cluster: Cluster, model: Path, armed: Path) -> None:
    """No batch is in flight until the loss is known, and none is on the instance that dies."""
    two, is_armed, num_losses = in_group(0, 1), False, cluster.snapshot.stats.num_losses

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal is_armed
        plan = two(snapshot, cost_model)
        if not is_armed and has_decode(plan):
            is_armed = True
            arm(armed, 2, "beat")
        is_lost = snapshot.stats.num_losses > num_losses
        return plan if is_lost or not is_armed else IterationPlan()

    run_and_lose(cluster, model, policy, 2, *KILLED)
    assert computed_twice(cluster) == set()


@pytest.mark.parametrize(("victim", "layer"), [(0, 0), (1, 1), (2, 2), (0, 2), (2, 0)])
def test_any_member_of_a_ring_dies_in_any_layer(
    cluster: Cluster, model: Path, armed: Path, victim: int, layer: int
) -> None:
    ring = in_group(0, 1, 2, chunk=12, transfer=Transfer.KV)
    policy = Arming(ring, has_second_chunk, armed, victim, f"layer {layer}")
    run_and_lose(cluster, model, policy, victim, *KILLED)
    assert policy.is_armed


@pytest.mark.parametrize(("victim", "masters"), [(0, (0,)), (1, (0,)), (1, (0, 1)), (2, (0, 1))])
def test_a_master_and_another_member_die_in_decode_steps_of_one_master_or_several(
    cluster: Cluster, model: Path, armed: Path, victim: int, masters: tuple[InstanceId, ...]
) -> None:
    decoding = in_group(0, 1, 2, masters=masters, num_steps=4)
    policy = Arming(decoding, has_decode, armed, victim, "layer 1")
    run_and_lose(cluster, model, policy, victim, *KILLED)


def moving_once(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    """Prefill on instance 0, move all KV to instance 1 after the first token, and decode there."""
    if any(instance.batch_id is not None for instance in snapshot.instances) or snapshot.migrations:
        return IterationPlan()
    for view in plannable(snapshot):
        if not view.is_decoding:
            return IterationPlan((prefill([view], (0,), transfer=Transfer.QUERY),))
        if view.placement.on(0):
            return IterationPlan(migrations=move(view, 0, 1))
        return IterationPlan((decode([view], (1,), {view.request_id: 1}, num_steps=2),))
    return IterationPlan()


@pytest.mark.parametrize(("victim", "point"), [(0, "gather"), (1, "scatter"), (0, "moved"), (1, "moved")])
def test_the_sender_and_the_receiver_die_in_a_migration_and_around_its_commit(
    cluster: Cluster, model: Path, armed: Path, victim: int, point: str
) -> None:
    policy = Arming(moving_once, has_migration, armed, victim, point)
    run_and_lose(cluster, model, policy, victim, *KILLED)
    ends = [item.is_committed for item in cluster.log if isinstance(item, MigrationFinished)]
    assert not ends[0], "it was rolled back"


def serving(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    """Prefill on instance 0, which then serves the decode steps of instance 2."""
    idle = {i.instance_id for i in snapshot.instances if i.is_idle}
    for view in plannable(snapshot):
        if not view.is_decoding and 0 in idle:
            return IterationPlan((prefill([view], (0,), num_tokens=12, transfer=Transfer.QUERY),))
        if view.is_decoding and 2 in idle:
            return IterationPlan((decode([view], (2,), {view.request_id: 2}, num_steps=12),))
    return IterationPlan()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_holder_dies_while_it_serves_and_so_does_a_member_that_it_serves(
    cluster: Cluster, model: Path, armed: Path, victim: int
) -> None:
    policy = Arming(serving, has_decode, armed, victim, "layer 2")
    run_and_lose(cluster, model, policy, victim, *KILLED)
    assert any(isinstance(item, RunBatch) and item.holder_ids == (0,) for item in cluster.log)


@pytest.mark.parametrize("when", [has_second_chunk, has_decode])
def test_an_error_in_a_forward_pass_is_a_loss_and_named(
    cluster: Cluster, model: Path, armed: Path, when: When
) -> None:
    policy = Arming(in_group(0, 1, 2, chunk=12), when, armed, 1, "layer 1", raises=True)
    run_and_lose(cluster, model, policy, 1, f"RuntimeError: {MESSAGE}")


def test_a_request_that_ends_every_instance_that_computes_it_fails_by_name(
    cluster: Cluster, model: Path, armed: Path
) -> None:
    before = cluster.snapshot.stats.num_losses
    alone = make_policy("replicas", PolicyConfig())

    def arming(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        plan = alone(snapshot, cost_model)
        for batch in plan.batches:
            arm(armed, batch.group.leader_id, "layer 0", raises=True)
        return plan

    with pytest.raises(ClusterError, match=f"{MAX_LOSSES} instances were lost while they computed request"):
        cluster.run(requests()[:1], arming, timeout=90)
    cluster.wait_until(lambda snapshot: len(snapshot.instances) == NUM_INSTANCES)
    # A failure may be known before the start of its batch, and is then counted against no request.
    assert cluster.snapshot.stats.num_losses >= before + MAX_LOSSES
    others = requests()
    assert_exact(model, others, cluster.run(others, ESP))


def test_a_request_whose_logits_are_not_finite_fails_alone(cluster: Cluster, model: Path) -> None:
    poisoned = greedy_request((*random_prompt(20, seed=9, vocab_size=POISON), POISON, 5), 12)
    before, others = cluster.snapshot.stats.num_losses, requests()
    outputs = cluster.run([poisoned, *others], ESP)
    (failed,) = outputs.pop(poisoned.request_id)
    assert failed.finish_reason is FinishReason.ERROR
    assert_exact(model, others, outputs)
    assert cluster.snapshot.stats.num_losses == before
