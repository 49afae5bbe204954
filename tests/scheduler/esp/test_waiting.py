"""No request waits forever, for any number and size of others."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, H200, H200_CAPACITY
from policies import POLICY_NAMES
from simulation import Run, instances_with, simulate, timed_request

from loong.core.cost.cost_model import CostModel, prefill_time
from loong.core.plan import IterationPlan
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import admissible_tokens, make_policy, policy_kind

CONFIG = PolicyConfig(
    target_ttft=0.05,
    ttft_factor=1.0,
    target_tpot=0.02,
    max_step_time=0.02,
    max_num_batched_tokens=512,
    lease_steps=8,
    chunk_tokens=64,
)


@dataclass
class Crowd:
    """Requests of one shape that come, `gap` seconds apart, until `one` has ended or `limit` has passed."""

    one: Request
    num_prompt: int
    num_output: int
    gap: float
    limit: float
    is_over: bool = False

    def arrivals(self) -> Iterator[Request]:
        """Those before it, it, and those after it, each drawn when the one before has come."""
        is_reported = False
        for number in count(1):
            time = number * self.gap
            if not is_reported and time >= self.one.arrival_time:
                is_reported = True
                yield self.one
            if self.is_over or time > self.limit:
                return
            yield timed_request(number, self.num_prompt, self.num_output, time)

    def run(
        self, name: str, capacities: list[int], config: PolicyConfig = CONFIG, cost_model: CostModel = CPU
    ) -> Run:
        """Run them under a policy."""
        plan_for = make_policy(name, config)

        def watched(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
            view = snapshot.request.get(self.one.request_id)
            has_come = snapshot.now > self.one.arrival_time
            self.is_over = has_come and (view is None or view.has_ended)
            return plan_for(snapshot, cost_model)

        return simulate(watched, capacities, self.arrivals(), cost_model=cost_model)


# Whole prompts without decodes: while prompts come, decodes stand still. As published,
# decodes give way to prompts of any length.
PROMPTS_FIRST = ("replicas", "static-sp", "tp", "esp-paper", "vllm-m", "vllm-s")
LIMIT = 4.0  # seconds that a crowd comes for: 80 of the config's TTFT targets, and hundreds of steps


@st.composite
def crowds(draw: st.DrawFn, name: str) -> tuple[list[int], Crowd]:
    """Draw pools, one request that needs at most half of its limit, and others that come early and late.

    The others may be longer or shorter, and may ask for much less or much more than there is.
    """
    kind = policy_kind(name)
    groups = st.integers(kind.num_decode + 1, min(3, kind.max_instances or 3) // kind.group_size)
    num_instances = kind.group_size * draw(groups)
    capacity = draw(st.sampled_from([50, 100, 250, 800, 3000]))
    half = admissible_tokens(name, instances_with([capacity] * num_instances)) // 2
    length = draw(st.integers(1, half))
    one = timed_request(0, length, draw(st.integers(1, min(40, half - length + 1))), draw(st.floats(0, 0.03)))
    num_prompt = draw(st.sampled_from([1, 10, capacity // 5, capacity - 40]))
    num_output = draw(st.integers(1, min(100, capacity - num_prompt + 1)))
    num_at_once = num_instances * draw(st.sampled_from([0.5, 1.0, 1.5]))
    gap = max(0.008, (20e-6 * num_prompt + 50e-6 * num_output) / num_at_once)
    return [capacity] * num_instances, Crowd(one, num_prompt, num_output, gap, LIMIT)


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(2, thorough=8)
@given(data=st.data())
def test_nobody_waits_for_ever_however_many_others_come(name: str, data: st.DataObject) -> None:
    capacities, crowd = data.draw(crowds(name))
    times = crowd.run(name, capacities).token_times[crowd.one.request_id]
    assert times[0] < 0.75 * LIMIT, "it began, if at all, when the crowd had gone"
    if name not in PROMPTS_FIRST:
        assert times[-1] < LIMIT, "it went on, if at all, when the crowd had gone"


@pytest.mark.parametrize("num_prompt", [3000, 4400])
def test_a_prompt_that_needs_half_of_all_slots_begins_among_many_that_end_with_each_step(
    num_prompt: int,
) -> None:
    one = timed_request(0, num_prompt, 39, 0.015)
    crowd = Crowd(one, num_prompt=600, num_output=4, gap=0.008, limit=LIMIT)
    assert crowd.run("esp", [3000] * 3).ttft(one) < LIMIT / 2


def test_a_long_prompt_goes_on_beside_short_ones_and_decodes_that_take_all_of_every_step() -> None:
    long = timed_request(0, 12_000, 4, 1.003)
    crowd = Crowd(long, num_prompt=4000, num_output=200, gap=0.125, limit=60.0)
    config = PolicyConfig(target_tpot=0.02)
    run = crowd.run("esp", [H200_CAPACITY], config, H200)
    assert run.ttft(long) < 2.7 * prefill_time(H200, 12_000, 0, 1) / config.deferred_share < crowd.limit


@pytest.mark.parametrize(
    ("capacities", "shape", "others"),
    [
        ([250], (228, 1), (11, 13)),
        ([83] * 3, (240, 2), (1, 13)),
        ([83] * 3, (200, 1), (1, 40)),
        ([500] * 2, (900, 1), (16, 60)),
        ([40] * 6, (200, 1), (3, 20)),
        ([150] * 2, (147, 3), (1, 59)),  # one of them has to drain
    ],
)
def test_a_prompt_that_needs_nearly_all_slots_gets_them_while_small_ones_come(
    capacities: list[int], shape: tuple[int, int], others: tuple[int, int]
) -> None:
    large = timed_request(0, *shape, 0.05)
    crowd = Crowd(large, *others, gap=0.006, limit=10.0)
    assert crowd.run("esp", capacities).ttft(large) < crowd.limit / 2
