"""When first tokens are due, and the others: as the request says, or by the length of its prompt."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, H200
from snapshots import waiting

from loong.core.cost.cost_model import prefill_time
from loong.core.request import SLO
from loong.scheduler.common.slo_targets import FirstTokenTargets, default_ttft, target_tpot
from loong.scheduler.config import PolicyConfig

CONFIG = PolicyConfig(target_ttft=1.0, target_tpot=0.04, ttft_factor=5.0)
TARGETS = FirstTokenTargets(H200.prefill_terms(8), CONFIG)


def test_targets_are_the_requests_own_or_grow_with_its_prompt() -> None:
    own = waiting("own", 500_000, slo=SLO(7.0, 0.2))
    assert (TARGETS.of(own), target_tpot(own, CONFIG)) == (7.0, 0.2)
    short, long = waiting("short", 100), waiting("long", 500_000)
    assert (TARGETS.of(short), target_tpot(short, CONFIG)) == (1.0, 0.04)
    assert TARGETS.of(long) == pytest.approx(5 * prefill_time(H200, 500_000, 0, 8))
    for slo, targets in ((SLO(ttft=7.0), (7.0, 0.04)), (SLO(tpot=0.2), (1.0, 0.2))):
        half = waiting("half", 100, slo=slo)
        assert (TARGETS.of(half), target_tpot(half, CONFIG)) == targets


def test_each_step_of_priority_doubles_the_target() -> None:
    for view in (waiting("r", 100), replace(waiting("r", 100), slo=SLO(2.0, 0.1))):
        usual = TARGETS.of(view)
        for priority in (-3, 0, 5):
            assert TARGETS.of(replace(view, priority=priority)) == usual * 2.0**priority


@given(
    st.integers(1, 2_000_000),
    st.floats(1e-3, 100.0) | st.just(inf),
    st.floats(0.1, 100.0),
    st.sampled_from([1, 4]),
)
def test_without_a_target_of_its_own_every_prompt_has_the_default(
    num_tokens: int, target_ttft: float, ttft_factor: float, dop: int
) -> None:
    config = PolicyConfig(target_ttft=target_ttft, ttft_factor=ttft_factor)
    for machine in (CPU, H200):
        widest = machine.prefill_terms(dop)
        found = FirstTokenTargets(widest, config).of(waiting("r", num_tokens))
        assert found == pytest.approx(default_ttft(num_tokens, widest, config), rel=1e-12)
