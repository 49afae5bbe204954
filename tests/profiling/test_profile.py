"""A profile of a cluster whose clock is known finds that clock."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from random import Random

import pytest
from examples import seeds
from profile_samples import NUM_INSTANCES, measured_scenarios
from simulation import instances_with

from loong.core.errors import ClusterError
from loong.core.events import InstanceLost
from loong.core.plan import Transfer
from loong.executor.simulated import SimulatedExecutor
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.tiny import CONFIG
from loong.profiling.found import Instances, found
from loong.profiling.measure import Measured, Profiler
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.scenarios import LEAST_ROOM, Limits
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.fit import BatchSample, MigrationSample
from loong.scheduler.cost.roofline import roofline

SHAPE = shape_of(CONFIG)
INSTANCES = Instances("tiny", SHAPE, tp_size=1, device="cpu", num_instances=NUM_INSTANCES)
PRIOR = roofline(SHAPE, DEVICES["cpu"])


def clock_near(prior: WorkCostModel, seed: int) -> WorkCostModel:
    random = Random(seed)
    values = ((value or 50e-6) * 2 ** random.uniform(-1, 1) for value in astuple(prior.coefficients))
    return replace(prior, coefficients=Coefficients(*values))


@pytest.fixture(scope="module")
def measured() -> Sequence[Measured]:
    clock = clock_near(PRIOR, seed=1)
    return [m for seed in range(5) for m in measured_scenarios(clock, seed, PRIOR)]


def test_a_profile_finds_the_clock_of_its_cluster(measured: Sequence[Measured]) -> None:
    file = found(INSTANCES, PRIOR, measured)
    assert file.errors["all"].num_samples > 50
    assert file.errors["all"].mean < 0.02
    assert file.errors["all"].p95 < 0.05
    truth = clock_near(PRIOR, seed=1).coefficients
    for name in ("step", "message", "moved_key"):
        assert file.coefficients[name] == pytest.approx(getattr(truth, name), rel=0.05), name


def test_every_sample_held_out_is_in_one_row_of_each_part_of_the_table(measured: Sequence[Measured]) -> None:
    errors = found(INSTANCES, PRIOR, measured).errors
    num_held_out = sum(m.is_held_out for m in measured)
    parts: Counter[str] = Counter()
    for label, row in errors.items():
        part = "term" if label.startswith("mostly") else "size" if "ms" in label else label.split()[0]
        parts[part] += row.num_samples
    assert parts["all"] == parts["term"] == parts["size"] == num_held_out
    kinds = ("prefill", "decode", "lease", "mixed")
    assert parts["DoP"] == sum(parts[kind] for kind in kinds) == num_held_out - parts["migration"]
    assert all(parts[kind] for kind in (*kinds, "migration"))


@pytest.mark.parametrize("num_instances", [1, 2])
@pytest.mark.parametrize("seed", seeds(2, thorough=8))
def test_the_shortest_profile_has_samples_to_fit_and_samples_held_out(seed: int, num_instances: int) -> None:
    measured = measured_scenarios(PRIOR, seed, PRIOR, num_instances=num_instances)
    assert {m.is_held_out for m in measured} == {False, True}


def test_a_profile_of_no_time_runs_each_scenario_once_after_a_round_that_warms_up() -> None:
    executor = SimulatedExecutor(PRIOR, [])
    cluster = ProfiledCluster(instances_with([8192] * 2), executor, PRIOR.host.idle)
    progress: list[float] = []

    async def pause(seconds: float) -> None:
        executor.pause(seconds)

    profiler = Profiler(cluster, Limits(), PRIOR, pause=pause)
    measured = asyncio.run(profiler.measure(0.0, progress.append))
    num_cases = 2 * 3 + 1  # kinds of scenarios at each DoP, and one where instances serve
    assert len(progress) == num_cases
    assert all(m.spread == 0 for m in measured)


def test_every_kind_of_work_is_measured_at_every_dop(measured: Sequence[Measured]) -> None:
    seen: set[tuple[int, object]] = set()
    for sample in (m.sample for m in measured):
        if isinstance(sample, BatchSample):
            for work, _ in sample.steps:
                dop = work.group.dop
                seen |= {(dop, work.phase.value)}
                seen |= {(dop, Transfer.KV)} if work.has_ring else set()
                seen |= {(dop, Transfer.QUERY)} if work.has_exchange else set()
                seen |= {(dop, "lease")} if work.is_lease else set()
                seen |= {(dop, "kept")} if any(w.num_kept_keys for w in work.instances.values()) else set()
    for dop in range(1, NUM_INSTANCES + 1):
        assert {(dop, kind) for kind in ("prefill", "decode", "mixed", "lease")} <= seen
        if dop > 1:
            assert {(dop, Transfer.KV), (dop, Transfer.QUERY), (dop, "kept")} <= seen
    moves = {(s.source_id, s.destination_id) for m in measured if isinstance(s := m.sample, MigrationSample)}
    assert len(moves) > NUM_INSTANCES


def test_groups_compute_more_at_once_than_an_instance_and_no_instance_more_than_a_chunk() -> None:
    slow = replace(PRIOR, coefficients=replace(PRIOR.coefficients, token=1e-4))  # time bounds its chunks
    limits, largest = Limits(), dict.fromkeys(range(1, NUM_INSTANCES + 1), 0)
    for seed in range(5):
        for measured in measured_scenarios(slow, seed, slow, kv_capacity=65536):
            if isinstance(sample := measured.sample, BatchSample):
                step = sample.steps[0][0]
                num_tokens = [work.num_tokens for work in step.instances.values()]
                assert max(num_tokens) <= limits.max_chunk_tokens + limits.max_decode_requests
                largest[step.group.dop] = max(largest[step.group.dop], sum(num_tokens))
    assert all(largest[dop] > largest[1] for dop in largest if dop > 1)


def test_leases_of_one_request_and_of_many_are_measured_at_every_dop(measured: Sequence[Measured]) -> None:
    for dop in range(1, NUM_INSTANCES + 1):
        samples = [
            m.sample for m in measured if isinstance(m.sample, BatchSample) and len(m.sample.steps) > 1
        ]
        sizes = {s.steps[0][0].num_requests for s in samples if s.steps[0][0].group.dop == dop}
        assert len(sizes) >= 4
        assert min(sizes) == 1


def test_decodes_over_kv_that_others_serve_are_measured_with_nothing_beside_them(
    measured: Sequence[Measured],
) -> None:
    steps = [
        work
        for m in measured
        if isinstance(m.sample, BatchSample)
        for work, _ in m.sample.steps
        if work.holders
    ]
    assert {len(work.holders) for work in steps} == {*range(1, NUM_INSTANCES)}
    assert all(work.group.dop == 1 and work.idle_holder_ids == work.holders.keys() for work in steps)


def test_the_same_seed_reports_the_same_stories() -> None:
    first, again = (measured_scenarios(PRIOR, seed=3) for _ in range(2))
    assert [m.sample for m in first] == [m.sample for m in again]


@pytest.mark.parametrize("seed", seeds(2, thorough=8))
def test_stories_keep_the_rules_where_there_is_little_room(seed: int) -> None:
    assert measured_scenarios(PRIOR, seed, PRIOR, kv_capacity=LEAST_ROOM)


def test_a_model_whose_least_step_takes_seconds_is_measured_beyond_that_step() -> None:
    slow = replace(PRIOR, coefficients=replace(PRIOR.coefficients, weights=2.0, token=5e-3))
    file = found(INSTANCES, slow, measured_scenarios(slow, 0, slow))
    assert file.ranges["num_tokens"][1] > 100


def test_a_profile_ends_with_the_instance_that_was_lost_and_why() -> None:
    lost = InstanceLost(0.3, 2, "ValueError: it is too small")
    with pytest.raises(ClusterError) as raised:
        measured_scenarios(PRIOR, 0, PRIOR, incidents=[lost])
    assert str(raised.value) == "instance 2 was lost: ValueError: it is too small"


def test_ranges_say_how_far_was_measured(measured: Sequence[Measured]) -> None:
    ranges = found(INSTANCES, PRIOR, measured).ranges
    assert list(ranges["dop"]) == [1, NUM_INSTANCES]
    assert ranges["num_requests"][1] > 8
    assert ranges["num_moved_keys"][0] >= 1
