"""KV may move at any time, to any pool and back; a move that fails changes nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from cluster import Cluster
from examples import seeds
from leak_checks import shared_cluster
from plans import decode, move, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.events import MigrationFinished
from loong.core.instructions import MoveKV, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.policy import Policy

Moves = Callable[[RequestView], Iterable[KVMigration]]


def moving_before_steps(group: tuple[InstanceId, ...], moves: Moves, homes: dict[RequestId, int]) -> Policy:
    """Run requests on their homes; the one without a home runs on `group`, one step at a time.

    Before each of its steps it makes `moves` once, and then moves back the KV outside its group. The others
    run at the same time.
    """
    moved_at: set[int] = set()

    def next_of_mover(view: RequestView) -> IterationPlan:
        moment = view.num_known_tokens + view.num_computed_tokens
        if moment not in moved_at:
            moved_at.add(moment)
            if migrations := tuple(moves(view)):
                return IterationPlan(migrations=migrations)
        outside = set(view.placement.instance_ids) - set(group)
        back = tuple(m for i in sorted(outside) for m in move(view, i, group[i % len(group)]))
        return IterationPlan(migrations=back) if back else IterationPlan((one_step(view, group),))

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        batches: list[BatchPlan] = []
        plan = IterationPlan()
        for view in plannable(snapshot):
            if (home := homes.get(view.request_id)) is None:
                plan = next_of_mover(view)
            else:
                batches.append(one_step(view, (home,), num_steps=3))
        is_alone = homes.keys() >= snapshot.request.keys()
        return replace(plan, batches=tuple(batches)) if plan.migrations or is_alone else plan

    return policy


def one_step(view: RequestView, group: tuple[InstanceId, ...], num_steps: int = 1) -> BatchPlan:
    """Return a chunk of nine tokens, or decode steps with the first of the group for master."""
    if view.is_decoding:
        return decode([view], group, {view.request_id: group[0]}, num_steps=num_steps)
    return prefill([view], group, num_tokens=9)


def num_moves_with_batches(cluster: Cluster) -> int:
    """Return the migrations that were sent together with a batch at one of their ends."""
    num_moves, busy_ids = 0, set[InstanceId]()
    for reported in cluster.log:
        match reported:
            case RunBatch(plan=plan):
                busy_ids.update(plan.group.instance_ids)
            case MoveKV(migration=migration):
                num_moves += not busy_ids.isdisjoint(
                    (migration.segment.instance_id, migration.destination_id)
                )
            case _:
                busy_ids.clear()
    return num_moves


@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_any_part_of_the_kv_moves_while_other_groups_run(
    any_cluster: Cluster, folder: Path, seed: int
) -> None:
    """Strided parts of every segment go to busy instances and to host tiers, and come back."""
    full_ids = any_cluster.full_ids
    group, home_ids = full_ids[: len(full_ids) // 2], full_ids[len(full_ids) // 2 :]
    targets = (*home_ids, *any_cluster.host_ids)
    random = Random(seed)

    def moves(view: RequestView) -> Iterator[KVMigration]:
        for segment in view.placement.segments:
            part = segment.positions[random.randrange(len(segment.positions)) :: random.randint(1, 3)]
            yield KVMigration(segment._replace(positions=part), random.choice(targets))

    mover = greedy_request(random_prompt(31, seed=31), 7)
    others = [greedy_request(random_prompt(6 + 17 * i, seed=i), 40) for i in home_ids]
    homes = {other.request_id: i for other, i in zip(others, home_ids, strict=True)}
    outputs = any_cluster.run([mover, *others], moving_before_steps(group, moves, homes))
    assert_exact(folder, [mover, *others], outputs)
    assert num_moves_with_batches(any_cluster) >= 2


def offloaded_once(source_id: InstanceId, host_id: InstanceId, back_id: InstanceId) -> Policy:
    """One request begins on an instance, is offloaded after two tokens, and goes on on another."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for view in plannable(snapshot):
            is_late, held = view.num_output_tokens >= 2, view.placement.instance_ids
            if is_late and held == (source_id,) and held != (back_id,):
                return IterationPlan(migrations=move(view, source_id, host_id))
            if held == (host_id,):
                return IterationPlan(migrations=move(view, host_id, back_id))
            return IterationPlan((one_step(view, held or (source_id,)),))
        return IterationPlan()

    return policy


def test_all_kv_goes_to_any_host_tier_and_comes_back_to_any_other_instance(
    any_cluster: Cluster, folder: Path
) -> None:
    """It fills the tier to the last slot: 95 prompt tokens, and the first output token.

    Each instance offloads to each tier and loads from each. Each goes on for each other instance.
    """
    full_ids = any_cluster.full_ids
    ways = product(range(len(full_ids)), range(len(any_cluster.host_ids)))
    for source, host in ways:
        source_id, host_id = full_ids[source], any_cluster.host_ids[host]
        back_id = full_ids[(source + 1 + host % (len(full_ids) - 1)) % len(full_ids)]
        request = greedy_request(random_prompt(95, seed=95), 5)
        outputs = any_cluster.run([request], offloaded_once(source_id, host_id, back_id))
        assert_exact(folder, [request], outputs)
        committed = [
            reported.is_committed for reported in any_cluster.log if isinstance(reported, MigrationFinished)
        ]
        assert committed == [True, True]


@pytest.fixture(scope="module")
def short_of_room(folder: Path) -> Iterator[Cluster]:
    """Two instances whose host tiers, 2 and 3, have room for 8 tokens each; the engine believes in 64."""
    config = ClusterConfig(str(folder), num_instances=2, kv_capacity=64, host_kv_capacity=8)
    believed = replace(config, host_kv_capacity=64).instances
    with shared_cluster(config, believed) as running:
        yield running


@pytest.mark.parametrize("host_id", [2, 3])
def test_a_migration_that_fails_is_rolled_back_and_its_request_goes_on(
    short_of_room: Cluster, folder: Path, host_id: InstanceId
) -> None:
    """Before each step, all KV is to go to a host tier, where only its first parts fit."""

    def moves(view: RequestView) -> Iterator[KVMigration]:
        return (KVMigration(segment, host_id) for segment in view.placement.segments)

    request = greedy_request(random_prompt(36, seed=36), 6)
    outputs = short_of_room.run([request], moving_before_steps((0, 1), moves, {}))
    assert_exact(folder, [request], outputs)
    finished = [reported for reported in short_of_room.log if isinstance(reported, MigrationFinished)]
    assert {reported.is_committed for reported in finished} == {True, False}
