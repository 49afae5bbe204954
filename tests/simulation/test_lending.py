"""Several engines whose managers lend room, in virtual time."""

from itertools import islice

import pytest

from loong.core.errors import ConfigError
from loong.lending.global_manager import Planning
from loong.lending.greedy import Thresholds
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.infinite.paper import StepModel
from loong.simulation.lending import LendingConfig, LendingCounts, LendingRun
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import endless_workload

COST_MODEL = WorkCostModel(Coefficients(decode_key=2e-6))
SWAPPING = Planning(least_swap=2)


def requests() -> list[WorkloadRequest]:
    return list(islice(endless_workload("sharegpt", seed=3, request_rate=200.0, length_scale=0.25), 60))


def run(config: LendingConfig) -> LendingCounts:
    return LendingRun(config, COST_MODEL).run(requests())


@pytest.mark.parametrize(
    "config",
    [
        LendingConfig(3, 60, can_borrow=False),
        LendingConfig(3, 60, planning=SWAPPING),
        LendingConfig(3, 60, planning=SWAPPING, loss=0.2, heartbeat=0.05),
        LendingConfig(3, 60, planning=Planning(StepModel(COST_MODEL), Thresholds(50, 0.9), joining_blocks=8)),
    ],
)
def test_every_request_ends_with_all_its_tokens_whatever_is_lent_or_lost(config: LendingConfig) -> None:
    counts = run(config)
    assert counts.num_output_tokens == sum(request.num_output_tokens for request in requests())
    assert bool(counts.num_moved_blocks) == (config.can_borrow or config.planning.model is not None)
    assert counts.num_remote_blocks <= counts.num_read_blocks


def test_a_new_gmanager_knows_everything_a_few_heartbeats_after_it_begins() -> None:
    counts = run(LendingConfig(3, 60, heartbeat=0.1, killed_at=0.5, restart_seconds=0.2))
    assert counts.num_output_tokens == sum(request.num_output_tokens for request in requests())
    assert counts.failover_seconds is not None
    assert counts.failover_seconds <= 0.5


def test_a_request_longer_than_a_pool_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a request needs .* blocks, but a pool has 2"):
        run(LendingConfig(3, 2))
