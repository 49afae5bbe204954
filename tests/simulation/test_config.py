from itertools import islice
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.runs.rates import parse_rates
from loong.simulation.config import MIN_REQUESTS, SimulatedLoadConfig
from loong.workloads.workload import make_workload


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
    assert parse_rates("--rate", text) == rates


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "nan", "inf", "1,0", "1:2", "2:1:1", "1:2:0", "1,2:3:1", "1:2:3:4", "1:9999:1"],
)
def test_what_is_no_rate_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--rate '{text}'"):
        parse_rates("--rate", text)


def test_a_duration_is_measured_whole_but_is_never_too_small_to_judge() -> None:
    config = SimulatedLoadConfig("sharegpt", duration=10.0)
    quick, slow = config.at(100.0), config.at(1.0)
    assert 9.0 < quick.measured[-1].arrival_time < 10.0
    assert len(slow.measured) == MIN_REQUESTS


def test_the_load_of_a_duration_goes_on_as_it_was() -> None:
    load = SimulatedLoadConfig("sharegpt", duration=10.0).at(50.0)
    following = list(islice(load.following, 20))
    assert following[0].arrival_time >= 10.0
    whole = make_workload("sharegpt", len(load.measured) + 20, seed=0, request_rate=50.0)
    assert [*load.measured, *following] == whole


def test_a_trace_is_measured_to_its_end_and_replayed_at_any_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    lines = [f"{time},10,5" for time in (0, 1, 2, 2, 2, 3, 10)]
    path.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *lines]))
    load = SimulatedLoadConfig(f"trace:{path}").at(6.0)
    assert [r.arrival_time for r in load.measured] == [t / 10 for t in (0, 1, 2, 2, 2, 3, 10)]
    assert not list(load.following)


def test_a_number_of_requests_is_all_that_is_sent_at_any_rate() -> None:
    loads = [SimulatedLoadConfig("sharegpt", num_requests=7).at(rate) for rate in (0.1, 1.0, 100.0)]
    assert [len(load.measured) for load in loads] == [7, 7, 7]
    assert not any(list(load.following) for load in loads)
