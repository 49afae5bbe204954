"""Steps whose micro-batches rotate over the members of a group, beside replicas with fixed batches."""

from dataclasses import replace
from itertools import cycle
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.cost.work import StepWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import striped
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel

NO_KV = 1e-12  # seconds a key: no time, if there are few


def model_of(weights: float, token: float, decode_key: float) -> WorkCostModel:
    """Return a model in which nothing else takes time."""
    coefficients = Coefficients(
        step=0.0, member=0.0, weights=weights, token=token, decode_key=decode_key, sent_query=0.0
    )
    return WorkCostModel(coefficients)


def step_of(members: tuple[int, ...], num_requests: int, num_keys: int, num_parts: int) -> StepWork:
    """Return a step of decodes whose history is on instance 9."""
    count = WorkCount(members, is_lease=True)
    for _, master_id in zip(range(num_requests), cycle(members), strict=False):
        count.add_decode(master_id, striped("", range(num_keys), (9,)))
    step = count.step(ESPGroup(members), is_first=False)
    return replace(
        step, num_micro_batches=num_parts, rotates=len(members) > 1, idle_holder_ids=frozenset((9,))
    )


@given(st.integers(2, 4), st.integers(1, 5), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_a_member_reads_its_weights_once_for_each_slice(
    dop: int, each: int, weights: float, token: float
) -> None:
    number = dop + 1
    step = step_of(tuple(range(dop)), each * number * dop, 1, number)
    seconds = model_of(weights, token, NO_KV).step_time(step)
    slices = hypot(weights, token * each * dop)
    assert seconds == pytest.approx(number / dop * slices, rel=1e-6)


@given(st.integers(2, 4), st.floats(0.1, 10.0))
def test_rotation_gains_no_more_over_fixed_batches_than_its_bound(
    dop: int, seconds_of_attention: float
) -> None:
    """Products take no longer than reading the weights, 1 second; replicas are perfectly staggered."""
    num_requests, num_keys = 4 * dop * (dop + 1), 1000
    model = model_of(1.0, 1e-9, seconds_of_attention / (num_requests * num_keys))
    rotating = model.step_time(step_of(tuple(range(dop)), num_requests, num_keys, dop + 1))
    own = num_requests // dop
    fixed = [
        max(model.step_time(step_of((0,), own, num_keys, parts)), seconds_of_attention) for parts in (1, 2, 3)
    ]
    assert min(fixed) / rotating <= (1 + dop + dop**2) / (dop + dop**2) * (1 + 1e-6)
