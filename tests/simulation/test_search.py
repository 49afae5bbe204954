import pytest

from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.runs import run_tables
from loong.runs.goodput import Goodput
from loong.runs.run import allowed_misses
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import PointResult, asked_of, run_point, sweep
from loong.simulation.search import goodputs_of_sweep, search, search_all
from loong.workloads.metrics.metrics import MIN_CLASS_REQUESTS
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.named import NAMES

TIGHT = parse_slo("tight")


def config(policies: tuple[str, ...] = ("replicas",), **changes: object) -> SimulateConfig:
    values: dict[str, object] = {
        "model": "llama-3.1-8b",
        "policies": policies,
        "rules": (TIGHT,),
        "rates": (),
        "hardware": Hardware(shape_of(SHAPES["llama-3.1-8b"]), "h200", num_instances=2),
        "load": SimulatedLoadConfig("leval", num_requests=15),
    }
    return SimulateConfig(**{**values, **changes})  # type: ignore[arg-type]


def goodput_cells(found: Goodput[PointResult]) -> list[str]:
    """Return the row of a goodput, as people see it."""
    return run_tables.goodput([found], goal=0.9).splitlines()[-1].split()


def test_the_goodput_attains_and_a_little_more_does_not() -> None:
    found = search(config(), "replicas", TIGHT, precision=0.2)
    assert found.best is not None
    assert found.best.attains
    assert found.too_high_rate is not None
    assert found.too_high_rate <= found.rate * 1.2
    assert not run_point(config(), asked_of(config(), "replicas", TIGHT, found.too_high_rate)).attains


def test_a_first_guess_may_be_far_off_on_either_side() -> None:
    from_below = search(config(rates=(0.1,)), "replicas", TIGHT, precision=0.2)
    from_above = search(config(rates=(100.0,)), "replicas", TIGHT, precision=0.2)
    assert from_below.rate == pytest.approx(from_above.rate, rel=0.3)


def test_a_policy_that_never_attains_is_reported_to_be_below_the_lowest_rate() -> None:
    impossible = parse_slo("ttft:0.001")
    found = search(config(rules=(impossible,)), "replicas", impossible, precision=0.2)
    lowest = found.points[0].rate
    assert (found.rate, found.best, found.too_high_rate) == (0.0, None, lowest)
    assert goodput_cells(found) == ["replicas", "<", f"{lowest:.4g}", "-", str(len(found.points))]


def test_a_run_that_is_cut_off_is_one_that_does_not_attain() -> None:
    point = asked_of(config(), "replicas", TIGHT, 100.0)
    whole, short = run_point(config(), point), run_point(config(), point, cuts_off=True)
    assert short.is_cut_off
    assert not whole.attains
    assert short.num_events < whole.num_events


def test_processes_find_what_one_process_finds() -> None:
    asked = config(("replicas", "static-sp"), load=SimulatedLoadConfig("leval", num_requests=12))
    alone = search_all(asked, 0.5)
    together = search_all(config(("replicas", "static-sp"), load=asked.load, num_jobs=2), 0.5)
    assert alone == together


def test_the_goodput_of_a_sweep_is_the_last_rate_before_the_first_that_misses() -> None:
    asked = config(rates=(0.5, 1.0, 100.0))
    results = sweep(asked)
    [found] = goodputs_of_sweep(asked, results)
    attained = [result.attains for result in results]
    assert attained[-1] is False
    assert found.rate == asked.rates[attained.index(False) - 1]


def test_a_load_that_attains_at_any_rate_is_reported_to_be_at_least_the_highest() -> None:
    loose = parse_slo("ttft:900000000")
    found = search(config(rules=(loose,), rates=(1.0,)), "replicas", loose, precision=0.2)
    assert found.best is not None
    assert all(point.attains for point in found.points)
    assert (found.rate, found.too_high_rate) == (found.points[-1].rate, None)
    assert goodput_cells(found) == ["replicas", ">=", f"{found.rate:.4g}", "-", str(len(found.points))]


def test_at_the_all_class_goodput_every_class_attains_and_no_work_piles_up() -> None:
    load = SimulatedLoadConfig("mixed", num_requests=60)
    by_class = search(config(load=load, is_per_class=True, rates=(0.05,)), "replicas", TIGHT, precision=0.5)
    assert by_class.best is not None
    assert by_class.best.asked.is_per_class
    found = by_class.best.as_json()
    classes = found["by_prompt_length"]
    assert isinstance(classes, list)
    judged = [each for each in classes if each["sent"] >= MIN_CLASS_REQUESTS]
    assert len(judged) >= 2
    assert all(each["slo_attainment"] >= 0.9 for each in judged)
    assert (found["is_per_class"], found["is_stable"]) == (True, True)
    share = found["capacity_share"]
    assert isinstance(share, float)
    assert 0 < share < 1


@pytest.mark.parametrize("workload", [*NAMES, "shared-prefix"])
def test_the_search_accepts_every_workload(workload: str) -> None:
    asked = config(load=SimulatedLoadConfig(workload, num_requests=80), is_per_class=True)
    assert max(allowed_misses(asked.load.at(1.0).measured, asked_of(asked, "esp", TIGHT, 1.0), 1.0).allowed)


def test_requests_and_their_order_are_the_same_at_every_rate() -> None:
    slow, fast = (SimulatedLoadConfig("mixed", num_requests=50).at(rate).measured for rate in (1.0, 4.0))
    assert [request.shape for request in slow] == [request.shape for request in fast]
    assert [request.arrival_time for request in slow] == pytest.approx(
        [4 * request.arrival_time for request in fast]
    )
