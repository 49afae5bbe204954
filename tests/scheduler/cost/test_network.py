"""Work that crosses hosts takes longer, by what crosses; work within a host does not."""

from dataclasses import astuple, replace

import numpy as np
import pytest
from machines import H200_GRAPH_LIMITS

from loong.core.cost.work import InstanceWork, StepWork
from loong.core.instance import ESPGroup
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.network import ONE_HOST, LinkRates, Links, Network
from loong.scheduler.cost.prediction import StepTable

HOST_IDS = (0, 0, 1, 1)
NETWORK = Network(HOST_IDS, slowdown=4.0, delay=0.01, message=0.002)
NEAR = WorkCostModel()
FAR = replace(NEAR, network=NETWORK)
PART = InstanceWork(num_requests=1, num_tokens=10, num_ring_keys=100, num_hops=2, num_sent_queries=60)


def step(*group: int, has_ring: bool = False, holders: tuple[int, ...] = ()) -> StepWork:
    """Return a step of a group whose members all have the same work, and holders that answer queries."""
    return StepWork(
        ESPGroup(group),
        dict.fromkeys(group, PART),
        has_ring=has_ring,
        has_exchange=not has_ring,
        holders=dict.fromkeys(holders, InstanceWork(num_sent_queries=60)),
    )


@pytest.mark.parametrize("group", [(0,), (0, 1), (3, 2)])
@pytest.mark.parametrize("has_ring", [False, True])
def test_a_group_within_a_host_is_as_quick_as_on_one_host(group: tuple[int, ...], has_ring: bool) -> None:
    assert FAR.step_time(step(*group, has_ring=has_ring)) == NEAR.step_time(step(*group, has_ring=has_ring))


def test_a_ring_between_hosts_waits_for_its_slowest_link() -> None:
    work = step(0, 1, 2, has_ring=True)
    assert NETWORK.slowed(work).instances[0].num_ring_keys == 400
    extra = 300 * NEAR.coefficients.ring_key
    queries = (4.0 - 1.0) * 60 * NEAR.coefficients.sent_query  # of instance 2, all others are elsewhere
    assert FAR.step_time(work) == pytest.approx(NEAR.step_time(work) + extra + queries + 2 * NETWORK.delay)


def test_queries_take_longer_by_the_share_of_others_that_are_on_other_hosts() -> None:
    slowed = NETWORK.slowed(step(0, 1, 2))
    assert [part.num_sent_queries for part in slowed.instances.values()] == [150, 150, 240]
    assert [part.num_ring_keys for part in slowed.instances.values()] == [100, 100, 100]
    work = step(0, 1, 2)
    extra = (240 - 60) * NEAR.coefficients.sent_query
    assert FAR.step_time(work) == pytest.approx(NEAR.step_time(work) + extra + NETWORK.delay)


def test_a_holder_on_another_host_is_slower_than_one_on_the_same() -> None:
    assert FAR.step_time(step(0, holders=(1,))) == NEAR.step_time(step(0, holders=(1,)))
    assert FAR.step_time(step(0, holders=(2,))) > NEAR.step_time(step(0, holders=(2,))) + NETWORK.delay
    assert NETWORK.slowed(step(0, holders=(2,))).holders[2].num_sent_queries == 240


def test_a_group_between_hosts_replays_no_captured_step() -> None:
    """Its kernels are started one by one, as without graphs."""
    coefficients = replace(NEAR.coefficients, launch=0.02)
    without = replace(FAR, coefficients=coefficients)
    captured = replace(without, graph_limits=H200_GRAPH_LIMITS)
    decode = InstanceWork(num_requests=1, num_tokens=1, num_keys=100, num_decode_keys=100, num_sent_queries=1)
    near, far = (replace(step(*group), instances=dict.fromkeys(group, decode)) for group in ((0, 1), (1, 2)))
    assert captured.step_time(far) == without.step_time(far)
    assert captured.step_time(near) < without.step_time(near)
    predicted = StepTable.of(captured, [near, far]).seconds(np.array([astuple(coefficients)]))
    assert predicted[0] == pytest.approx([captured.step_time(near), captured.step_time(far)])


def test_prompts_on_more_instances_than_a_host_has_send_queries_between_hosts() -> None:
    for dop in (1, 2):
        assert FAR.prefill_terms(dop) == NEAR.prefill_terms(dop)
    near, far = NEAR.prefill_terms(4), FAR.prefill_terms(4)
    assert far.overhead == pytest.approx(near.overhead + NETWORK.delay)
    assert NETWORK.query_factor(4) == 1 + 3 * 2 / 3
    queries = 3 * NEAR.coefficients.sent_query / 4
    assert far.per_token == pytest.approx(near.per_token + 2 * queries)


def test_migrations_between_hosts_are_slower_but_not_those_to_a_host_tier() -> None:
    near, far = (replace(model, first_host_tier_id=4) for model in (NEAR, FAR))
    assert far.migration_time(100, 0, 1) == near.migration_time(100, 0, 1)
    moved = near.migration_time(100, 0, 1)
    assert far.migration_time(100, 1, 2) == pytest.approx(
        moved + NETWORK.message + 300 * NEAR.coefficients.moved_key
    )
    assert far.migration_time(100, 0, 4) == near.migration_time(100, 0, 4)
    assert NETWORK.host_of(6) == 1  # the tier of instance 2
    assert ONE_HOST.host_of(6) == 0


def test_no_link_between_hosts_is_better_than_one_within() -> None:
    slow, quick = LinkRates(1e9, 1e-3), LinkRates(2e9, 1e-4)
    assert Network.of(HOST_IDS, Links(slow, quick), num_layers=2) == Network(HOST_IDS)
    found = Network.of(HOST_IDS, Links(quick, slow), num_layers=2)
    assert (found.host_ids, found.slowdown) == (HOST_IDS, 2.0)
    assert (found.delay, found.message) == pytest.approx((1.8e-3, 9e-4))
    assert Network.of((0, 0), Links(quick, slow), num_layers=2) is ONE_HOST
