import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from loong.workloads.metrics.counters import ServerCounters, parse_counters


def scrape(dops: list[int], *, scale_ups: int = 0, retained: int = 0) -> str:
    registry = CollectorRegistry()
    sizes = Histogram("loong:esp_group_size", "DoP", ["phase"], registry=registry, buckets=(1, 2, 3, 4, 8))
    for index, dop in enumerate(dops):
        sizes.labels("prefill" if index % 2 else "decode").observe(dop)
    for name, value in (
        ("loong:esp_scale_up", scale_ups),
        ("loong:esp_scale_down", 0),
        ("loong:kv_retained_tokens", retained),
        ("loong:kv_migrated_tokens", 0),
    ):
        Counter(name, "help", registry=registry).inc(value)
    return generate_latest(registry).decode()


@given(dops=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=30))
def test_batches_are_counted_by_dop_over_all_labels(dops: list[int]) -> None:
    by_dop = parse_counters(scrape(dops)).num_batches_by_dop
    assert by_dop == {dop: dops.count(dop) for dop in (1, 2, 3, 4, 8)}


def test_a_run_is_what_was_added_between_two_scrapes() -> None:
    before = parse_counters(scrape([1, 2], scale_ups=3, retained=10))
    after = parse_counters(scrape([1, 2, 2, 4], scale_ups=5, retained=1_000_010))
    assert after.since(before) == ServerCounters(
        num_batches_by_dop={1: 0, 2: 1, 3: 0, 4: 1, 8: 0},
        num_scale_ups=2,
        num_scale_downs=0,
        num_retained_tokens=1_000_000,
        num_migrated_tokens=0,
    )


def test_errors_of_the_cost_model_are_those_of_the_end() -> None:
    name = "loong:cost_model_relative_error"
    before, after = (
        parse_counters(f'# TYPE {name} gauge\n{name}{{phase="decode"}} {error}\n') for error in (0.5, 0.25)
    )
    assert after.since(before).cost_model_errors == {"decode": 0.25}


def test_a_counter_that_came_up_during_the_run_started_at_zero() -> None:
    after = parse_counters(scrape([2], scale_ups=5))
    assert after.since(ServerCounters()) == after


def test_another_engine_leaves_every_count_unknown() -> None:
    counters = parse_counters('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{m="a"} 2\n')
    assert counters == ServerCounters()
    assert counters.since(parse_counters(scrape([1]))) == ServerCounters()


def test_what_is_not_prometheus_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not found"):
        parse_counters("<html>not found</html>\n")
