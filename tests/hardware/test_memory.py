"""KV that fits this machine's memory, and what is said where weights or KV do not."""

import re

import pytest

from loong.core.errors import ConfigError
from loong.hardware import memory
from loong.hardware.memory import GIB, LEAST_KV_TOKENS, MAX_AUTO_TOKENS, fit_kv_capacity
from loong.model.tiny import CONFIG

KV = CONFIG.kv_layout().bytes_per_token
WEIGHTS = memory.weight_bytes(CONFIG)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Return the bytes that the kernel calls available."""
    monkeypatch.setattr(memory, "_available_bytes", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("available", [4 * (WEIGHTS + 5000 * KV)], indirect=True)
def test_what_is_suggested_takes_half_and_what_is_asked_for_may_take_all(available: int) -> None:
    assert fit_kv_capacity(CONFIG, 2, None) == 5000
    assert fit_kv_capacity(CONFIG, 4, 5000) == 5000
    with pytest.raises(ConfigError, match=r"for 5,001 tokens.*--kv-cache-tokens 5000 would fit"):
        fit_kv_capacity(CONFIG, 4, 5001)


@pytest.mark.parametrize("available", [100 * GIB], indirect=True)
def test_no_more_is_suggested_than_is_of_use(available: int) -> None:
    assert fit_kv_capacity(CONFIG, 1, None) == MAX_AUTO_TOKENS


@pytest.mark.parametrize("available", [6 * (WEIGHTS + LEAST_KV_TOKENS * KV)], indirect=True)
def test_weights_of_too_many_instances_name_the_number_that_fits(available: int) -> None:
    num_instances = 3 + 3 * LEAST_KV_TOKENS * KV // WEIGHTS + 1
    with pytest.raises(ConfigError, match="--num-instances 3 would fit") as raised:
        fit_kv_capacity(CONFIG, num_instances, None)
    assert "-" not in re.sub(r"--\w+(-\w+)*", "", str(raised.value)), "no number is negative"
    assert "half of the" in str(raised.value)


@pytest.mark.parametrize("available", [WEIGHTS], indirect=True)
def test_where_not_one_instance_fits_that_is_said(available: int) -> None:
    with pytest.raises(ConfigError, match="Not one instance fits"):
        fit_kv_capacity(CONFIG, 4, None)
