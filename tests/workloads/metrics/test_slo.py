import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.workloads.metrics.record import RequestRecord, TokenUsage
from loong.workloads.metrics.slo import NAMED_RULES, SLOLimits, parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest


def made(*token_times: float) -> RequestRecord:
    """Record a request of 5 tokens that was sent at 0."""
    request = WorkloadRequest(0.0, RequestShape((TokenRun(0, 5),), len(token_times)))
    usage = TokenUsage(5, len(token_times))
    return RequestRecord(request, 0.0, 0.0, token_times, token_times[-1], usage, None)


def prefill_time(num_prompt_tokens: int) -> float:
    return num_prompt_tokens / 1_000


def test_absolute_bounds_are_milliseconds() -> None:
    rule = parse_slo("ttft:2000 tpot:50")
    assert rule.limits(10**6) == SLOLimits(ttft=2.0, tpot=0.05, e2el=math.inf)
    assert not rule.needs_prefill_time


@pytest.mark.parametrize(
    ("name", "ttft", "tpot"), [("mlperf-8b", 2, 0.1), ("mlperf-8b-interactive", 0.5, 0.03)]
)
def test_rules_of_mlperf_are_the_same_for_all_lengths(name: str, ttft: float, tpot: float) -> None:
    assert parse_slo(name).limits(10**6) == SLOLimits(ttft, tpot, e2el=math.inf)


@pytest.mark.parametrize(
    ("name", "num_prompt_tokens", "ttft"),
    [
        ("loongserve-12", 100, 15.0),
        ("loongserve-12", 1_000, 25.0),
        ("tight", 100, 1.0),
        ("tight", 1_000, 5.0),
    ],
)
def test_named_rules_follow_the_unloaded_prefill_above_a_floor(
    name: str, num_prompt_tokens: int, ttft: float
) -> None:
    limits = parse_slo(name).limits(num_prompt_tokens, prefill_time)
    assert limits == SLOLimits(ttft=ttft, tpot=0.05, e2el=math.inf)


@given(
    text=st.sampled_from([*NAMED_RULES, "ttft:100 tpot:20 e2el:4000"]),
    scale=st.floats(0.01, 100),
    num_prompt_tokens=st.integers(1, 10**6),
)
def test_a_scale_multiplies_every_bound(text: str, scale: float, num_prompt_tokens: int) -> None:
    plain = parse_slo(text).limits(num_prompt_tokens, prefill_time)
    scaled = parse_slo(text, scale=scale).limits(num_prompt_tokens, prefill_time)
    assert (scaled.ttft, scaled.tpot, scaled.e2el) == pytest.approx(
        (plain.ttft * scale, plain.tpot * scale, plain.e2el * scale)
    )


def test_an_interactive_request_has_half_a_second_and_15_ms_a_token() -> None:
    rule = parse_slo("interactive")
    assert rule.limits(100, prefill_time) == SLOLimits(ttft=0.5, tpot=0.015, e2el=math.inf)
    assert rule.limits(1_000, prefill_time).ttft == 3.0


def test_one_target_of_a_rule_can_be_varied() -> None:
    tight, varied = NAMED_RULES["tight"], parse_slo("tight,tpot:10", scale=2)
    assert varied == replace(tight, name="tight,tpot:10", tpot=0.010, scale=2)
    assert varied.describe() == (
        "tight,tpot:10 (TTFT <= max(5 x unloaded prefill, 1 s), TPOT <= 10 ms, all x 2)"
    )
    several = parse_slo("interactive,ttft:250,factor:2.5")
    assert (several.ttft, several.prefill_factor, several.tpot) == (0.25, 2.5, 0.015)


def test_the_report_names_the_rule_its_bounds_and_its_scale() -> None:
    assert parse_slo("tight", scale=2).describe() == (
        "tight (TTFT <= max(5 x unloaded prefill, 1 s), TPOT <= 50 ms, all x 2)"
    )
    assert parse_slo("ttft:2000 e2el:9000").describe() == "absolute (TTFT <= 2000 ms, E2EL <= 9000 ms)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        ("fast", "neither a rule"),
        ("ttft=2000", "neither a rule"),
        ("ttft:-5", "neither a rule"),
        ("ttft:0", "not above 0"),
        ("latency:5", "the metrics are ttft, tpot, e2el"),
        ("ttft:5 ttft:6", "twice"),
        ("tight,", "empty"),
        ("tight,tpot", "neither a rule"),
        ("tight,latency:5", "the metrics are ttft, tpot, e2el"),
        ("tight,tpot:5,tpot:6", "twice"),
        ("tight,factor:2,factor:3", "twice"),
        ("tight,factor:0", "factor above 0"),
        ("fast,tpot:10", "neither a rule"),
        ("loongserve-10-mixed,tpot:10", "means of a run"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_would_work(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_slo(text)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_must_be_a_number_above_zero(scale: float) -> None:
    with pytest.raises(ConfigError, match="--slo-scale"):
        parse_slo("tight", scale=scale)


def test_a_rule_about_prefills_wants_to_know_their_time() -> None:
    with pytest.raises(ValueError, match="unloaded prefill"):
        parse_slo("tight").limits(5)


def test_one_missed_bound_is_a_miss_and_no_tpot_is_none() -> None:
    limits = SLOLimits(ttft=1.0, tpot=0.5, e2el=2.0)
    assert limits.ratio(made(1.0, 1.5, 2.0)) == 1.0
    assert limits.ratio(made(0.25)) == 0.25
    assert limits.ratio(made(1.25, 1.5, 2.0)) == 1.25
    assert limits.ratio(made(0.25, 1.0)) == 1.5
    assert limits.ratio(made(1.0, 1.5, 2.0, 2.5)) == 1.25
    assert limits.ratio(replace(made(1.0), error="lost")) == math.inf


def test_latencies_per_token_have_bounds_of_their_own() -> None:
    record = made(1.0, 2.0, 3.0)  # of a prompt of 5 tokens
    bounds = {"normalized": 3 / 8, "normalized_input": 1 / 5, "normalized_output": 2 / 3}
    for name, bound in bounds.items():
        limits = SLOLimits(math.inf, math.inf, math.inf, **{name: bound / 2})
        assert limits.ratio(record) == pytest.approx(2.0)


def test_the_rule_of_means_depends_on_the_workload() -> None:
    rule = parse_slo("loongserve-10", workload="leval@poisson(2)", scale=2)
    assert rule.describe() == (
        "loongserve-10-leval (means of the run: E2EL per token <= 3.5 ms, TTFT per prompt token <= 1.8 ms, "
        "the rest per output token <= 320 ms, all x 2)"
    )
    with pytest.raises(ConfigError, match=r"no bounds for workload 'zipf1\.0'; name one of loongserve-10"):
        parse_slo("loongserve-10", workload="zipf1.0")


def test_bounds_of_a_token_are_targets_of_requests_too() -> None:
    limits = parse_slo("loongserve-10", workload="leval", scale=2).limits(1000)
    assert (limits.ttft, limits.tpot) == (math.inf, math.inf)
    assert limits.targets(1000) == pytest.approx((3.6, 0.64))
    tight = parse_slo("tight").limits(1000, lambda _: 0.5)
    assert tight.targets(1000) == (tight.ttft, tight.tpot) == (2.5, 0.05)
