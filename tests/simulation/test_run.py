from collections.abc import Iterable
from itertools import count
from math import log
from statistics import pstdev

import pytest
from simulation import instances_with

from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy
from loong.simulation.arrivals import request_of
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Host, Load
from loong.simulation.run import REFUSED, SimulatedRun, simulate
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.misses import Misses
from loong.workloads.metrics.record import CUT_OFF
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

LOOSE = parse_slo("ttft:60000 tpot:1000").limits_of(None)


def request(arrival_time: float, num_prompt: int, num_output: int = 4) -> WorkloadRequest:
    return WorkloadRequest(arrival_time, RequestShape((TokenRun(0, num_prompt),), num_output))


def run(
    load: list[WorkloadRequest],
    *,
    policy: str = "replicas",
    slo: str = "ttft:60000 tpot:1000",
    host: Host | None = None,
    max_misses: float = float("inf"),
    following: Iterable[WorkloadRequest] = (),
    keeps_prefixes: bool = True,
) -> SimulatedRun:
    cluster = SimulatedCluster(instances_with([1000, 1000]), WorkCostModel(), max_request_tokens=1000)
    plan = make_policy(policy, PolicyConfig())
    return simulate(
        plan,
        cluster,
        Load(load, following),
        parse_slo(slo).limits_of(None),
        host=host,
        misses=Misses((max_misses,)),
        keeps_prefixes=keeps_prefixes,
    )


def test_every_request_has_a_record_in_its_place_with_all_its_tokens() -> None:
    load = [request(0.1 * number, 50 + number, 3 + number) for number in range(6)]
    records = run(load).records
    assert [record.request for record in records] == load
    assert [len(record.token_times) for record in records] == [3, 4, 5, 6, 7, 8]
    assert all(record.is_completed and record.ttft > 0 for record in records)


def test_a_request_is_for_the_user_the_workload_names() -> None:
    sent = WorkloadRequest(0.5, RequestShape((TokenRun(0, 9),), 4, "someone"))
    assert request_of(3, sent, LOOSE).user == "someone"


def test_a_request_that_can_never_fit_is_refused_and_counts_as_a_miss() -> None:
    load = [request(0.0, 100), request(0.0, 998, 4), request(0.0, 997, 4)]
    records = run(load).records
    assert [record.error for record in records] == [None, REFUSED, None]
    assert compute_metrics(records, LOOSE).attainment == pytest.approx(2 / 3)


def test_a_run_ends_once_too_many_have_missed() -> None:
    load = [request(0.01 * number, 500, 100) for number in range(20)]
    cut_off = run(load, slo="ttft:50 tpot:1000", max_misses=3)
    assert cut_off.is_cut_off
    assert CUT_OFF in {record.error for record in cut_off.records}
    whole = run(load, slo="ttft:50 tpot:1000")
    assert not whole.is_cut_off
    assert cut_off.num_events < whole.num_events


def test_refused_requests_count_towards_what_may_be_missed() -> None:
    assert run([request(0.0, 5000), request(0.0, 10)], max_misses=0).is_cut_off
    assert not run([request(0.0, 5000), request(0.0, 10)], max_misses=1).is_cut_off


@pytest.mark.parametrize(("keeps_prefixes", "num_cached"), [(True, 199), (False, 0)])
def test_equal_prompts_are_computed_once_unless_the_prefix_cache_is_off(
    num_cached: int, *, keeps_prefixes: bool
) -> None:
    result = run([request(0.0, 200), request(9.0, 200)], keeps_prefixes=keeps_prefixes)
    assert result.stats.num_cached_tokens == num_cached


def test_a_busy_host_makes_everything_slower() -> None:
    load = [WorkloadRequest(0.0, RequestShape((TokenRun(seed, 200),), 4)) for seed in range(2)]
    alone = run(load).records
    shared = run(load, host=Host(num_cores=1)).records
    delayed = run(load, host=Host(plan_time=0.5)).records
    assert [record.ttft for record in shared] == pytest.approx([2 * record.ttft for record in alone])
    assert [record.ttft for record in delayed] == pytest.approx([0.5 + record.ttft for record in alone])


def test_noise_makes_some_batches_slower_and_others_quicker_the_same_ones_each_time() -> None:
    load = [request(2.0 * number, 200, 1) for number in range(40)]
    exact = run(load).records
    noisy, again = (run(load, host=Host(noise=0.2)).records for _ in range(2))
    ratios = [record.ttft / other.ttft for record, other in zip(noisy, exact, strict=True)]
    assert [record.ttft for record in noisy] == [record.ttft for record in again]
    assert 10 < sum(ratio > 1 for ratio in ratios) < 30
    assert 0.1 < pstdev(map(log, ratios)) < 0.3


def test_the_load_goes_on_until_what_is_measured_has_ended_or_missed() -> None:
    load = [request(0.0, 900, 20)]
    crowd = (request(0.01 * number, 900, 20) for number in count(1))
    measured = run(load, following=crowd)
    assert [record.is_completed for record in measured.records] == [True]
    late = run([request(0.0, 900, 20)] * 9, slo="ttft:60 tpot:1000", following=crowd)
    assert len(late.records) == 9
    assert all(record.is_completed for record in late.records)
    assert late.stats.num_arrived > 9
