from math import inf

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulation import instances_with, simulate, timed_request, with_memory
from snapshots import snapshot_of, waiting

from loong.core.errors import ConfigError
from loong.core.events import InstanceDraining, InstanceJoined, InstanceLost
from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.core.plan import IterationPlan
from loong.core.request import Request, SamplingParams
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import admissible_tokens, check_instances, make_policy, policy_kind

NAMES = ("lamina", "lamina-by-request", "lamina-rotational")
USERS = [name for name in ("esp", *NAMES) if policy_kind(name).uses_memory]


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("serves", [Service.ALL, Service.OWN_HOST])
@examples(5, thorough=32)
@given(data=st.data())
def test_every_request_ends_with_exactly_its_tokens(name: str, serves: Service, data: st.DataObject) -> None:
    pools = data.draw(st.lists(st.integers(8, 60), min_size=1, max_size=3), label="pools")
    memory = data.draw(st.lists(st.integers(8, 90), min_size=1, max_size=3), label="memory")
    most = admissible_tokens(name, with_memory(instances_with(pools, serves), memory))
    lengths = st.tuples(st.integers(1, most), st.integers(1, most))
    shapes = data.draw(st.lists(lengths, min_size=1, max_size=8), label="lengths")
    requests = [timed_request(i, p, min(o, most - p + 1), 0.01 * i) for i, (p, o) in enumerate(shapes)]
    config = PolicyConfig(
        lease_steps=data.draw(st.sampled_from([1, 2, 16])),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 7, 512])),
        target_ttft=data.draw(st.sampled_from([0.02, inf])),
    )
    run = simulate(name, pools, requests, config=config, serves=serves, memory=memory)
    assert {r: len(t) for r, t in run.tokens.items()} == {
        r.request_id: r.sampling_params.max_tokens for r in requests
    }
    assert run.stats.num_preemptions == 0


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_pushed_and_decodes_read_them_where_they_are(name: str) -> None:
    requests = [timed_request(i, 100, 60, 0.001 * i) for i in range(12)]
    run = simulate(name, [400, 400], requests, memory=[1000, 1000])
    assert run.stats.num_pushed_tokens == 1200
    assert run.stats.num_served_leases == run.stats.num_leases > 0
    members = {i for _, plan in run.plans for batch in plan.batches for i in batch.group.instance_ids}
    assert members == {0, 1}
    by_memory = [s.placement.tokens_by_instance() for found, _ in run.plans for s in found.running]
    halves = {
        (held.get(2, 0), held.get(3, 0)) for held in by_memory if held.get(2, 0) + held.get(3, 0) == 100
    }
    assert halves == ({(100, 0), (0, 100)} if name == "lamina-by-request" else {(50, 50)})


def test_kv_that_decodes_make_moves_before_there_is_too_little_room() -> None:
    requests = [timed_request(i, 10, 300) for i in range(8)]
    run = simulate("lamina", [600], requests, memory=[2000, 2000])
    assert run.stats.num_migrated_tokens > 0
    assert run.stats.num_preemptions == 0


@pytest.mark.parametrize("name", USERS)
def test_memory_instances_may_be_lost_join_and_leave_at_any_time(name: str) -> None:
    requests = [timed_request(i, 60, 40, 0.02 * i) for i in range(10)]
    back = ElasticInstance(2, 1, InstanceKind.ATTENTION, 800)
    incidents = (
        InstanceLost(0.08, 2, returns=True),
        InstanceJoined(0.2, back),
        InstanceDraining(0.3, 3),
        InstanceLost(0.35, 2, returns=True),
        InstanceJoined(0.5, back),
    )
    pools = [400, 400] if name in NAMES else [120, 120]  # `esp` offloads only where room is short
    run = simulate(name, pools, requests, memory=[800, 800], incidents=incidents)
    assert {len(tokens) for tokens in run.tokens.values()} == {40}
    assert run.stats.num_losses == 2
    assert run.stats.num_recomputed_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_prompts_read_what_memory_instances_have_of_earlier_ones(name: str) -> None:
    requests = [timed_request(i, 100, 20, 0.5 * i) for i in range(6)]
    run = simulate(name, [400], requests, memory=[300, 300], keeps_prefixes=True)
    assert run.stats.num_cached_tokens == 5 * 99  # all but the last of each prompt
    assert run.stats.num_pushed_tokens == 100 + 5
    assert len(run.tokens) == 6


@pytest.mark.parametrize("name", USERS)
@examples(5, thorough=60)
@given(data=st.data())
def test_cached_kv_on_memory_instances_is_evicted_where_room_is_short(name: str, data: st.DataObject) -> None:
    pools = data.draw(st.lists(st.integers(20, 60), min_size=1, max_size=2), label="pools")
    memory = data.draw(st.lists(st.integers(20, 60), min_size=1, max_size=3), label="memory")
    most = admissible_tokens(name, with_memory(instances_with(pools), memory))
    lengths = st.tuples(st.integers(1, 2), st.integers(1, most), st.integers(1, 12))
    shapes = data.draw(st.lists(lengths, min_size=2, max_size=12), label="tokens and lengths")
    pause = data.draw(st.sampled_from([0.0, 0.01, 0.2]), label="pause")
    requests = [
        Request(
            f"r{i:03}",
            (token,) * p,
            SamplingParams(max_tokens=min(o, most - p + 1)),
            arrival_time=pause * i,
        )
        for i, (token, p, o) in enumerate(shapes)
    ]
    run = simulate(name, pools, requests, memory=memory, keeps_prefixes=True)
    assert {r: len(t) for r, t in run.tokens.items()} == {
        r.request_id: r.sampling_params.max_tokens for r in requests
    }


def test_a_request_can_have_what_memory_instances_hold() -> None:
    instances = with_memory(instances_with([100, 100]), [300, 50])
    assert admissible_tokens("lamina", instances) == 350
    run = simulate("lamina", [100, 100], [timed_request(0, 330, 20)], memory=[300, 50])
    assert len(run.tokens["r000"]) == 20
    assert admissible_tokens("lamina", instances_with([100, 80])) == 100


@pytest.mark.parametrize(("most", "is_cut"), [(1, False), (None, True), (3, True)])
def test_leases_are_cut_where_products_can_hide_served_attention(most: int | None, is_cut: bool) -> None:
    requests = [timed_request(i, 200, 30) for i in range(6)]
    config = PolicyConfig(max_micro_batches=most)
    run = simulate("lamina", [2000], requests, memory=[1000, 1000], config=config)
    assert (run.stats.num_micro_batched_leases > 0) == is_cut
    whole = simulate(
        "lamina", [2000], requests, memory=[1000, 1000], config=PolicyConfig(max_micro_batches=1)
    )
    assert (run.ended_at < whole.ended_at) == is_cut


def test_micro_batches_rotate_over_all_instances_once_none_has_prompts() -> None:
    requests = [timed_request(i, 200, 30) for i in range(9)]
    run = simulate("lamina-rotational", [2000, 2000], requests, memory=[1500, 1500])
    leases = [batch for _, plan in run.plans for batch in plan.batches if batch.num_steps > 1]
    assert {(batch.group.dop, batch.num_micro_batches) for batch in leases if batch.rotates} == {(2, 3)}
    assert all(batch.group.dop == 2 for batch in leases)
    alone = simulate("lamina", [2000, 2000], requests, memory=[1500, 1500])
    assert run.tokens.keys() == alone.tokens.keys()


@pytest.mark.parametrize("name", ["replicas", "esp-fixed-2", "infinite", "tp"])
def test_a_policy_that_does_not_use_memory_instances_says_who_does(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy {name} keeps no KV on --memory-instances; give .*lamina"):
        check_instances(name, with_memory(instances_with([100]), [100]))


def test_nothing_is_planned_where_only_memory_instances_are_left() -> None:
    snapshot = snapshot_of([100], [waiting("r", 10)])
    memory = ElasticInstance(0, 1, InstanceKind.ATTENTION, 100)
    found = type(snapshot)(0.0, (memory,), waiting=snapshot.waiting)
    plan = make_policy("lamina", PolicyConfig())(found, WorkCostModel())
    assert plan == IterationPlan()
