import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.workloads.slo import NAMED_RULES, SLOLimits, parse_slo


def prefill_time(num_prompt_tokens: int) -> float:
    return num_prompt_tokens / 1_000


def test_absolute_bounds_are_milliseconds() -> None:
    rule = parse_slo("ttft:2000 tpot:50")
    assert rule.limits(10**6) == SLOLimits(ttft=2.0, tpot=0.05, e2el=math.inf)
    assert not rule.needs_prefill_time


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
    limits = SLOLimits(ttft=1.0, tpot=0.1, e2el=5.0)
    assert limits.are_met(ttft=1.0, tpot=0.1, e2el=5.0)
    assert limits.are_met(ttft=1.0, tpot=None, e2el=1.0)
    assert not limits.are_met(ttft=1.1, tpot=0.1, e2el=5.0)
    assert not limits.are_met(ttft=1.0, tpot=0.2, e2el=5.0)
    assert not limits.are_met(ttft=1.0, tpot=0.1, e2el=5.1)
