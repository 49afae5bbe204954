"""Groups that never change: what their steps hold, and where their KV stays."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU
from simulation import Run, simulate, timed_request
from snapshots import decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.plan import BatchPlan, IterationPlan, Preemption, PreemptionReason
from loong.core.request import Request
from loong.scheduler.baselines.lightllm import most_slots
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy, policy_kind

FIXED = ("tp", "replicas", "static-sp", "chunked", "chunked-replicas", "lightllm", "vllm-m", "vllm-s")
WHOLE = ("tp", "replicas", "static-sp", "vllm-m", "vllm-s")
CHUNKED = ("chunked", "chunked-replicas", "lightllm")


def batches_of(run: Run) -> list[BatchPlan]:
    return [batch for _, plan in run.plans for batch in plan.batches]


def num_computed(batch: BatchPlan, request_ids: Iterable[str]) -> int:
    return sum(len(block.positions) for r in request_ids for block in batch.blocks_of(r))


def pools(name: str, num_tokens: int) -> list[int]:
    return [num_tokens] * (policy_kind(name).max_instances or 3)


def workload(num_requests: int, gap: float) -> list[Request]:
    return [timed_request(n, 5 + 61 * n % 150, 3 + 7 * n % 40, n * gap) for n in range(num_requests)]


def prompts_in(batch: BatchPlan, requests: Sequence[Request]) -> list[Request]:
    """Return the requests of a batch whose prompts it begins."""
    return [
        r
        for r in requests
        if r.request_id in batch.request_ids
        and min(block.positions[0] for block in batch.blocks_of(r.request_id)) == 0
    ]


@pytest.mark.parametrize("name", WHOLE)
def test_prompts_are_computed_whole_in_steps_of_their_own_within_the_budget(name: str) -> None:
    requests = workload(30, 0.005)
    run = simulate(name, pools(name, 2000), requests, config=PolicyConfig(max_num_batched_tokens=100))
    for batch in batches_of(run):
        if prompts := prompts_in(batch, requests):
            lengths = [len(r.prompt_token_ids) for r in prompts]
            assert len(prompts) == len(batch.request_ids)
            assert num_computed(batch, batch.request_ids) == sum(lengths)
            assert sum(lengths) <= 100 * batch.group.dop or len(prompts) == 1


@pytest.mark.parametrize("name", ["tp", "static-sp"])
def test_nobody_decodes_while_a_prompt_could_begin(name: str) -> None:
    requests = workload(30, 0.001)
    run = simulate(name, pools(name, 5000), requests, config=PolicyConfig(max_num_batched_tokens=100))
    for snapshot, plan in run.plans:
        assert not (snapshot.waiting and any(batch.num_steps > 1 for batch in plan.batches))


@pytest.mark.parametrize("name", FIXED)
def test_a_prompt_ends_the_lease_that_runs_after_its_present_step(name: str) -> None:
    first, second = timed_request(0, 20, 200), timed_request(1, 20, 5, 0.1)
    run = simulate(name, pools(name, 1000)[:1], [first, second], config=PolicyConfig(lease_steps=100))
    steps = [time for time in run.token_times["r000"] if 0.1 < time < run.token_times["r001"][0]]
    assert len(steps) <= 2


@pytest.mark.parametrize("name", CHUNKED)
def test_a_step_has_a_token_of_every_decode_and_chunks_of_the_oldest_prompts(name: str) -> None:
    requests = workload(30, 0.005)
    run = simulate(name, pools(name, 5000), requests, config=PolicyConfig(chunk_tokens=64))
    for snapshot, plan in run.plans:
        for batch in plan.batches:
            (instance_id,) = batch.group.instance_ids
            at_rest = [v for v in snapshot.running if v.placement.instance_ids == (instance_id,)]
            assert {v.request_id for v in at_rest if v.is_decoding} <= set(batch.request_ids)
            assert num_computed(batch, batch.request_ids) <= 64
            chunked = [r for r in batch.request_ids if not snapshot.request[r].is_decoding]
            unfinished = [
                r for r in chunked if num_computed(batch, [r]) < snapshot.request[r].num_uncomputed_tokens
            ]
            assert unfinished in ([], chunked[-1:])


@pytest.mark.parametrize("name", CHUNKED)
def test_a_prompt_goes_on_however_many_decode(name: str) -> None:
    decoding = [timed_request(n, 4, 60) for n in range(8)]
    long = timed_request(9, 30, 2, 0.1)
    run = simulate(name, pools(name, 2000)[:1], [*decoding, long], config=PolicyConfig(chunk_tokens=4))
    assert run.token_times["r009"][0] < run.token_times["r000"][-1]


def test_static_sp_stripes_every_prompt_and_spreads_masters_over_all_instances() -> None:
    requests = [timed_request(n, 90 + n, 20) for n in range(8)]
    run = simulate("static-sp", [1000] * 4, requests)
    for batch in batches_of(run):
        assert batch.group.instance_ids == (0, 1, 2, 3)
        if prompts_in(batch, requests):
            for request_id in batch.request_ids:
                kept = Counter(s.instance_id for s in batch.writes_of(request_id) for _ in s.positions)
                assert max(kept.values()) - min(kept.values()) <= 1
        elif len(batch.request_ids) == 8:
            assert set(Counter(block.master_id for block in batch.queries).values()) == {2}


def test_a_new_request_goes_to_the_least_promised_or_to_the_most_free_memory() -> None:
    views = [
        decoding("few to come", 90, (0,), 10),
        decoding("many to come", 50, (1,), 300),
        waiting("new", 20),
    ]
    snapshot = snapshot_of([1000] * 2, views)
    chosen = {
        name: [batch.group.instance_ids for batch in plan.batches if "new" in batch.request_ids]
        for name in ("replicas", "vllm-m")
        for plan in [make_policy(name, PolicyConfig())(snapshot, CPU)]
    }
    assert chosen == {"replicas": [(0,)], "vllm-m": [(1,)]}


@pytest.mark.parametrize("name", ["replicas", "chunked-replicas", "vllm-m"])
def test_a_request_stays_on_one_replica_and_all_are_used(name: str) -> None:
    run = simulate(name, [1000] * 3, workload(30, 0.002))
    instances_of: dict[str, set[tuple[int, ...]]] = {}
    for batch in batches_of(run):
        for request_id in batch.request_ids:
            instances_of.setdefault(request_id, set()).add(batch.group.instance_ids)
    assert all(len(groups) == 1 for groups in instances_of.values())
    assert set.union(*instances_of.values()) == {(0,), (1,), (2,)}


@pytest.mark.parametrize("name", [*FIXED, "disaggregated-1"])
def test_where_decodes_have_no_slots_the_latest_gives_way_and_no_other(name: str) -> None:
    decode_id = 1 if name == "disaggregated-1" else 0
    views = [replace(decoding(f"r{n}", 20, (decode_id,)), arrival_time=float(n)) for n in range(3)]
    snapshot = snapshot_of([60] * (decode_id + 1), views)
    plan = make_policy(name, PolicyConfig())(snapshot, CPU)
    check_plan(snapshot, plan)
    assert plan == IterationPlan(preemptions=(Preemption("r2"),))


def test_what_its_group_can_never_hold_is_preempted_for_that() -> None:
    long = replace(decoding("long", 20, (0,)), max_tokens=100)
    plan = make_policy("replicas", PolicyConfig())(
        snapshot_of([60, 200], [long, decoding("r", 20, (0,))]), CPU
    )
    assert plan.preemptions == (Preemption("long", PreemptionReason.TOO_LONG),)


def test_lightllm_over_commits_the_pool_by_its_ratio_and_not_without_one() -> None:
    requests = [timed_request(n, 20, 1500) for n in range(4)]
    num_preemptions = {}
    for share in (0.0, 1.0):
        config = PolicyConfig(router_token_ratio=share, lease_steps=64)
        run = simulate("lightllm", [3500], requests, config=config)
        assert [len(run.token_times[r.request_id]) for r in requests] == [1500] * 4
        num_preemptions[share] = run.stats.num_preemptions
    assert num_preemptions[1.0] > num_preemptions[0.0] == 0


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), max_size=6))
def test_the_most_slots_are_those_of_a_count_step_by_step(lengths: list[tuple[int, int]]) -> None:
    steps = range(max((num_to_come for _, num_to_come in lengths), default=1))
    in_use = [sum(known + step for known, num_to_come in lengths if num_to_come > step) for step in steps]
    assert most_slots(lengths) == max(in_use)


@pytest.mark.parametrize("name", [*(name for name in FIXED if name != "lightllm"), "disaggregated-1"])
@examples(5, thorough=40)
@given(data=st.data())
def test_nobody_who_was_admitted_is_evicted(name: str, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(10, 120))
    shapes = st.tuples(st.integers(1, capacity), st.integers(1, 40), st.floats(0, 0.02, allow_nan=False))
    now, requests = 0.0, []
    for number, (num_prompt, num_output, gap) in enumerate(data.draw(st.lists(shapes, max_size=20))):
        now += gap
        num_output = min(num_output, capacity - num_prompt + 1)
        requests.append(timed_request(number, num_prompt, num_output, now))
    config = PolicyConfig(
        lease_steps=data.draw(st.sampled_from([1, 3, 16, 64])),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 30, 512])),
        chunk_tokens=data.draw(st.sampled_from([1, 8, 512])),
    )
    num_instances = policy_kind(name).max_instances or 4
    assert simulate(name, [capacity] * num_instances, requests, config=config).stats.num_preemptions == 0
