"""Scale-ups and scale-downs, read from what ran."""

from collections import Counter
from pathlib import Path

import pytest

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.group_changes import GroupChange
from loong.core.instance import ESPGroup
from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.distributions.scalings import scalings_of
from loong.workloads.metrics.slo import parse_slo


def batch(
    batch_id: int, group: tuple[int, ...], *request_ids: str, holder_ids: tuple[int, ...] = ()
) -> BatchSlice:
    start = float(batch_id)
    return BatchSlice(
        batch_id, ESPGroup(group), Phase.MIXED, start, start + 1.0, request_ids, (), holder_ids=holder_ids
    )


def test_changes_are_those_of_the_groups_of_each_request() -> None:
    batches = (
        batch(1, (0,), "a"),
        batch(2, (0, 1), "a", "b"),  # a had one of them
        batch(3, (2, 3, 4), "c"),  # the first of c
        batch(4, (0, 1), "a"),
        batch(5, (0, 1, 2), "a", "c"),  # of a it grew, of c it is another
        batch(6, (2,), "c"),
        batch(7, (1,), "a", holder_ids=(0,)),  # which serves what it has
    )
    found = scalings_of(ClusterHistory(tuple(reversed(batches))))
    assert [(one.batch.batch_id, one.change) for one in found] == [
        (2, GroupChange.GREW),
        (5, GroupChange.GREW),
        (5, GroupChange.HANDED_OVER),
        (6, GroupChange.SHRANK),
        (7, GroupChange.HANDED_OVER),
    ]


@pytest.mark.parametrize("policy", ["esp", "esp-paper", "esp-disaggregated-1"])
def test_the_history_of_a_run_has_the_changes_that_its_server_counts(policy: str, tmp_path: Path) -> None:
    config = SimulateConfig(
        model="llama-3.1-8b",
        policies=(policy,),
        rules=(parse_slo("tight"),),
        rates=(2.0,),
        hardware=Hardware(shape_of(SHAPES["llama-3.1-8b"]), "h200", num_instances=4),
        load=SimulatedLoadConfig("zipf1.0", num_requests=25),
        output_dir=tmp_path,
    )
    run = run_point(config, asked_of(config, policy, config.rules[0], 2.0), keeps_history=True)
    assert run.history is not None
    counts, counters = Counter(one.change for one in scalings_of(run.history)), run.counters
    assert counts[GroupChange.GREW] == counters.num_scale_ups
    assert counts[GroupChange.SHRANK] == counters.num_scale_downs
    assert counts[GroupChange.HANDED_OVER] == counters.num_hand_overs
    assert counts
    batches = run.history.batches
    assert counters.busy_seconds == pytest.approx(_covered([(b.started_at, b.ended_at) for b in batches]))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total, end = total + max(0.0, stop - max(start, end)), max(end, stop)
    return total
