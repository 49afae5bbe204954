from math import floor, inf, log10

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.hardware.model_shape import shape_of
from loong.model.tiny import CONFIG
from loong.simulation.capacity import predicted_capacity, rounded_down
from loong.simulation.cluster import Hardware
from loong.simulation.config import Host
from loong.workloads.workload import make_workload


def capacity(length_scale: float, *, num_cores: float = inf, kv_cache_tokens: int | None = None) -> float:
    hardware = Hardware(shape_of(CONFIG), "cpu", num_instances=4, kv_cache_tokens=kv_cache_tokens)
    requests = make_workload("mixed", 60, seed=0, length_scale=length_scale)
    shapes = [request.shape for request in requests]
    return predicted_capacity(hardware.cluster("static-sp"), shapes, Host(num_cores), keeps_prefixes=True)


def test_longer_requests_and_fewer_processors_are_predicted_to_be_slower() -> None:
    assert capacity(1 / 64) > capacity(1 / 32) > capacity(1 / 16)
    assert capacity(1 / 32) > capacity(1 / 32, num_cores=2) > capacity(1 / 32, num_cores=1)


def test_a_workload_of_which_nothing_fits_has_no_capacity() -> None:
    with pytest.raises(ConfigError, match="no request fits the 4 tokens of KV"):
        capacity(1 / 64, kv_cache_tokens=1)


@given(st.floats(1e-6, 1e6))
def test_a_rate_is_rounded_to_two_digits_that_are_not_above_it(rate: float) -> None:
    rounded = rounded_down(rate)
    unit = 10.0 ** (floor(log10(rate)) - 1)
    assert rounded <= rate * (1 + 1e-9)
    assert rate - rounded < unit * (1 + 1e-6)
    assert float(f"{rounded:.2g}") == rounded
