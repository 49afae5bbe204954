from dataclasses import replace

from simulation import instances_with

from loong.core.instance import with_host_tiers
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Load
from loong.simulation.run import SimulatedRun, simulate
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

NUM_TOKENS = 600
LOOSE = parse_slo("ttft:60000 tpot:1000").limits_of(None)


def run(host_tokens: int, seconds_a_token: float = 1e-9) -> SimulatedRun:
    """Ask for four documents, of which an instance holds one, and then for each again."""
    coefficients = replace(Coefficients(), token=1e-3, offloaded_key=seconds_a_token)
    model = WorkCostModel(coefficients, first_host_tier_id=1)
    cluster = SimulatedCluster(with_host_tiers(instances_with([1000]), 1, host_tokens), model, 1000)
    shapes = [
        RequestShape((TokenRun(number % 4, NUM_TOKENS), TokenRun(9 + number, 9)), 4) for number in range(8)
    ]
    load = Load([WorkloadRequest(100.0 * number, shape) for number, shape in enumerate(shapes)])
    return simulate(make_policy("esp", PolicyConfig()), cluster, load, LOOSE)


def cached(found: SimulatedRun) -> list[int | None]:
    return [record.usage.num_cached_tokens for record in found.records if record.usage is not None]


def test_what_has_gone_to_host_memory_comes_back_sooner_than_it_is_computed() -> None:
    found, without = run(10_000), run(0)
    assert cached(found) == [0] * 4 + [NUM_TOKENS] * 4
    assert sum(filter(None, cached(without))) < NUM_TOKENS
    assert found.stats.num_loaded_tokens >= 3 * NUM_TOKENS
    assert found.stats.num_offloaded_tokens >= found.stats.num_loaded_tokens
    assert all(record.ttft < 0.3 * found.records[0].ttft for record in found.records[4:])


def test_what_takes_longer_to_come_than_to_compute_does_not_go() -> None:
    assert run(10_000, seconds_a_token=1.0).stats.num_offloaded_tokens == 0
