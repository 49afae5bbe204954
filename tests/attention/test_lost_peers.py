"""A step of which an instance is lost or fails is an error on all others, never a wrong value."""

from collections.abc import Mapping
from concurrent.futures import Future

import pytest
import torch
from attention_steps import GivenStep
from attention_world import AttentionWorld, Heads, Tokens, attention_world
from torch import Tensor

from loong.core.errors import ClusterError, InvalidPlanError
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import InstanceId, KVSegment, Placement, striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.fabric.errors import AbandonedError, DeadlineError, PeerLostError
from loong.worker.kv.pool import KVPool

Outputs = Mapping[InstanceId, Future[dict[tuple[str, int], Tensor]]]

HISTORY, CHUNK = range(9), range(9, 15)

LAYOUT = KVLayout(1, row_of_heads(2, 4), "float32")
EMPTY = KVPool(LAYOUT, 40, torch.device("cpu"))


def step_of(transfer: Transfer, group: tuple[int, ...], held_by: tuple[int, ...], kept_by: int) -> GivenStep:
    """Return a step of one request whose chunk all members compute."""
    stripes = [CHUNK[i :: len(group)] for i in range(len(group))]
    queries = tuple(QueryBlock("r0", p, i, transfer) for i, p in zip(group, stripes, strict=True))
    writes = tuple(KVSegment("r0", p, kept_by) for p in stripes)
    return GivenStep(BatchPlan(ESPGroup(group), queries, writes), {"r0": striped("r0", HISTORY, held_by)})


STEPS = {
    "of a ring": step_of(Transfer.KV, (0, 1, 2), (0, 1, 2), kept_by=1),
    "of a ring that pushes to it": step_of(Transfer.KV, (0, 1), (0, 1), kept_by=2),
    "that holds KV": step_of(Transfer.QUERY, (0, 1), (2,), kept_by=2),
    "that several masters push to": step_of(Transfer.QUERY, (0, 1), (0,), kept_by=2),
}


def failures(world: AttentionWorld, step: GivenStep, absent: InstanceId) -> dict[InstanceId, type]:
    """Return the error of each instance that began a step which one has not."""
    running, _ = world.begin(step, Tokens.of(step, Heads(), seed=1), absent=(absent,))
    return errors_of(running)


def errors_of(running: Outputs) -> dict[InstanceId, type]:
    return {instance_id: type(future.exception(timeout=60)) for instance_id, future in running.items()}


@pytest.mark.parametrize("name", STEPS)
def test_an_instance_that_was_lost_before_the_step_is_an_error_on_all_others(name: str) -> None:
    with attention_world(3) as world:
        world.lose(2)
        assert failures(world, STEPS[name], absent=2) == {0: PeerLostError, 1: PeerLostError}


@pytest.mark.parametrize("name", STEPS)
def test_an_instance_that_is_lost_in_the_step_is_an_error_on_all_others(name: str) -> None:
    step = STEPS[name]
    with attention_world(3) as world:
        running, _ = world.begin(step, Tokens.of(step, Heads(), seed=1), absent=(2,))
        world.lose(2)
        found = errors_of(running)
        assert found.keys() == {0, 1}
        assert all(issubclass(error, ClusterError) for error in found.values())
        assert PeerLostError in found.values()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("failing", range(3))
def test_an_instance_without_its_kv_ends_the_step_of_all_others(name: str, failing: int) -> None:
    """It raises an error of its own, and tells the others."""
    step = STEPS[name]
    elsewhere = Placement(tuple(s for s in step.placements["r0"].segments if s.instance_id != failing))
    lacking = GivenStep(step.batch, {"r0": elsewhere})
    with attention_world(3) as world:
        running, _ = world.begin(
            step, Tokens.of(step, Heads(), seed=1), pools={failing: lacking.pool_of(failing, LAYOUT)}
        )
        found = errors_of(running)
    assert found.pop(failing) is InvalidPlanError
    assert set(found.values()) == {AbandonedError}


@pytest.mark.parametrize("name", STEPS)
def test_a_world_goes_on_after_a_step_that_failed(name: str) -> None:
    step = STEPS[name]
    tokens = Tokens.of(step, Heads(), seed=1)
    with attention_world(3) as world:
        expected = world.run(step, tokens)
        running, _ = world.begin(step, tokens, pools={1: EMPTY})
        assert InvalidPlanError in errors_of(running).values()
        again = world.run(step, tokens)
    assert all(again.out[token].equal(out) for token, out in expected.out.items())


@pytest.mark.parametrize("name", STEPS)
def test_an_instance_that_is_silent_is_an_error_at_the_deadline(name: str) -> None:
    """No step ends before all that is pushed is stored."""
    with attention_world(3, deadline=1.5) as world:
        found = failures(world, STEPS[name], absent=2)
    assert DeadlineError in found.values()
    assert set(found.values()) <= {DeadlineError, AbandonedError}
