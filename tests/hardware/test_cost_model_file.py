"""A cost model file says what it is of, and is refused where it does not fit or is damaged."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loong.core.errors import ConfigError
from loong.hardware.chosen_cost_model import chosen_cost_model, chosen_tiles
from loong.hardware.cost_model_file import (
    FORMAT,
    FORMER,
    AttentionTiles,
    CostModelFile,
    Errors,
    read_cost_model,
    write_cost_model,
)
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.tiny import CONFIG
from loong.scheduler.cost.cost_model import Coefficients
from loong.scheduler.cost.network import ONE_HOST, LinkRates, Links
from loong.scheduler.cost.roofline import roofline

SHAPE = shape_of(CONFIG)
FILE = CostModelFile(
    format=FORMAT,
    model="tiny",
    shape=asdict(SHAPE),
    tp_size=1,
    device="cpu",
    num_instances=2,
    date="2026-01-01T00:00:00+00:00",
    versions={"loong": "0"},
    machine={"processor": "abacus"},
    coefficients=asdict(Coefficients(step=1.5e-3)),
    overlap=0.0,
    undetermined=["offloaded_key"],
    graph_limits=asdict(DEVICES["cpu"].graph_limits),
    host=asdict(DEVICES["cpu"].host),
    lane={"delay": 0.001, "loss": 0.002, "crowding": 0.9},
    ranges={"dop": (1, 2), "num_keys": (0, 1000)},
    repeat_spread=0.1,
    errors={"all": Errors(10, 0.05, 0.1, 0.2)},
    links=asdict(Links(LinkRates(4e9, 1e-4), LinkRates(1e9, 3e-4))),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cost-model.json"
    write_cost_model(FILE, path)
    return path


def rewrite(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    file = read_cost_model(path)
    assert file == FILE
    model = file.cost_model(num_instances=3)
    assert model.coefficients == Coefficients(step=1.5e-3)
    assert model.first_host_tier_id == 3


def test_links_between_hosts_are_slower_by_their_ratio_of_bandwidth(path: Path) -> None:
    file = read_cost_model(path)
    assert file.cost_model(2).network == file.cost_model(2, (0, 0)).network == ONE_HOST
    network = file.cost_model(2, (0, 1)).network
    assert network.slowdown == 4.0
    assert network.delay == pytest.approx(CONFIG.num_layers * 2e-4)


def test_a_file_of_the_former_format_has_room_for_as_much_kv_as_rows(path: Path) -> None:
    former = {**json.loads(path.read_text()), "format": FORMER}
    limits = former["graph_limits"]
    del limits["most_kv_room"], limits["most_gathered"]
    path.write_text(json.dumps(former))
    room = {"most_kv_room": limits["most_kv_rows"], "most_gathered": 10 * limits["most_kv_rows"]}
    assert read_cost_model(path) == msgspec.structs.replace(FILE, graph_limits={**limits, **room})


SIZES = (4096, 65536, 256, 128, 512, 4096, 1024, 16384, 65536, 1 << 24)  # of tiles


def test_tiles_are_those_that_were_measured_if_any_were(path: Path, tmp_path: Path) -> None:
    assert chosen_tiles(None) is None
    assert chosen_tiles(path) is None
    tiles = AttentionTiles(*SIZES)
    other = tmp_path / "with-tiles.json"
    write_cost_model(msgspec.structs.replace(FILE, attention_tiles=tiles), other)
    assert chosen_tiles(other) == SIZES


def test_tiles_that_are_no_multiples_of_one_another_are_refused(path: Path) -> None:
    tiles = msgspec.structs.asdict(AttentionTiles(*SIZES))
    for wrong in ({"keys": 1000}, {"square": 0}, {"few_queries": 192}, {"least_queries": 64}):
        rewrite(path, attention_tiles={**tiles, **wrong})
        with pytest.raises(ConfigError, match="do not fit each other"):
            read_cost_model(path)


def test_a_file_for_people_has_a_line_for_each_number(path: Path) -> None:
    assert '    "step": 0.0015,' in path.read_text().splitlines()


def test_a_file_that_is_not_there_or_damaged_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.json"):
        read_cost_model(tmp_path / "missing.json")
    for damaged in (path.read_bytes()[:-30], b'{"format": 11, "a": ' + b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is no cost model"):
            read_cost_model(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": FORMAT + 1, "taste": "sour"}, "this version reads format"),
        ({"color": "red"}, "color"),
        ({"coefficients": {**asdict(Coefficients()), "tea": 1.0}}, r"coefficients\.tea is unknown"),
        ({"coefficients": {"step": 1.0}}, r"coefficients\.attend is missing"),
        ({"links": {}}, r"links\.between_hosts is missing"),
        (
            {"links": {**FILE.links, "within_host": {"bandwidth": 1.0}}},
            r"links\.within_host\.latency is missing",
        ),
        (
            {"links": {**FILE.links, "within_host": {"bandwidth": 0.0, "latency": 0.0}}},
            r"bandwidth of within_host must be 1 to 1e\+18, but is 0",
        ),
        (
            {"links": {**FILE.links, "within_host": {"bandwidth": 1.0, "latency": -1.0}}},
            "latency of within_host must be 0 to .*, but is -1",
        ),
        ({"coefficients": asdict(Coefficients(token=-1.0))}, r"token must be 1e-15 to 1e\+09, but is -1"),
        ({"coefficients": asdict(Coefficients(token=0.0))}, r"token must be 1e-15 to 1e\+09, but is 0"),
        ({"shape": {}}, r"shape\.element_bytes is missing"),
        ({"graph_limits": {}}, r"graph_limits\.keys_a_row is missing"),
        ({"host": {**FILE.host, "tea": 5.0}}, r"host\.tea is unknown"),
        ({"host": {**FILE.host, "idle": -1.0}}, "idle must be 0 to .*, but is -1"),
        ({"coefficients": asdict(Coefficients(pair=1e10))}, r"pair must be 0 to 1e\+09, but is 1e\+10"),
        ({"overlap": 1.5}, "overlap must be 0 to 1, but is 1.5"),
        ({"graph_limits": {**FILE.graph_limits, "most_rows": 2**60}}, "most_rows must be 0 to 1e"),
    ],
)
def test_keys_and_values_that_cannot_be_are_named(
    path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_cost_model(rewrite(path, **changes))


def test_a_file_of_another_model_device_or_size_is_refused_with_both_values() -> None:
    FILE.check_fits(SHAPE, 1, "cpu")
    with pytest.raises(ConfigError, match="tp_size 1, but is to be used with tp_size 2"):
        FILE.check_fits(SHAPE, 2, "cpu")
    with pytest.raises(ConfigError, match="device cpu, but is to be used with device h200"):
        FILE.check_fits(SHAPE, 1, "h200")
    with pytest.raises(ConfigError, match="num_layers 2, but is to be used with num_layers 32"):
        FILE.check_fits(replace(SHAPE, num_layers=32), 1, "cpu")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_cost_model(FILE, tmp_path / "nowhere" / "cost-model.json")


def test_a_request_for_more_than_was_measured_is_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    greatest = {"dop": 2, "num_keys": 4000}
    model = chosen_cost_model(path, SHAPE, "cpu", num_instances=2, tp_size=1, greatest=greatest)
    assert model == FILE.cost_model(2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "num_keys may reach 4,000, but at most 1,000 was measured" in warning


def test_without_a_file_the_roofline_of_the_device_serves() -> None:
    model = chosen_cost_model(None, SHAPE, "cpu", num_instances=2, tp_size=1, greatest={})
    assert model == replace(roofline(SHAPE, DEVICES["cpu"]), first_host_tier_id=2)
