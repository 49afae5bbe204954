import pytest

from loong.core.errors import ConfigError
from loong.launcher.simulate.config import MIN_REQUESTS, Load, parse_rates


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("2", (2.0,)),
        ("4,1,2,2", (1.0, 2.0, 4.0)),
        ("2:8:0.5", tuple(2 + 0.5 * index for index in range(13))),
        ("0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        ("1:2:0.75", (1.0, 1.75)),
    ],
)
def test_rates_are_read(text: str, rates: tuple[float, ...]) -> None:
    assert parse_rates(text) == rates


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "nan", "inf", "1,0", "1:2", "2:1:1", "1:2:0", "1,2:3:1", "1:2:3:4", "1:9999:1"],
)
def test_what_is_no_rate_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--rate '{text}'"):
        parse_rates(text)


def test_a_load_of_a_duration_lasts_so_long_but_is_never_too_small_to_judge() -> None:
    load = Load("sharegpt", duration=10.0)
    quick, slow = load.at(100.0), load.at(1.0)
    assert 9.0 < quick[-1].arrival_time < 10.0
    assert len(slow) == MIN_REQUESTS


def test_a_load_of_a_number_has_it_at_any_rate() -> None:
    load = Load("sharegpt", num_requests=7)
    assert [len(load.at(rate)) for rate in (0.1, 1.0, 100.0)] == [7, 7, 7]
