"""Chrome traces as Perfetto wants them."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from loong.core.cluster_history import BatchSlice, ClusterHistory, KVMove
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.server.metrics.trace import chrome_trace, letters

ALL = ESPGroup((1, 0, 2))
PREFILL = BatchSlice(
    7, ALL, Phase.PREFILL, 1.5, 2.0, ("r1", "r2"), ((1, 20), (0, 10), (2, 0)), ((0, 9),), 30, 25
)
CHUNK = BatchSlice(8, ESPGroup((0, 1, 2)), Phase.MIXED, 2.001, 2.5, ("r1",), ((0, 12),))
DECODE = BatchSlice(9, ESPGroup((2,)), Phase.DECODE, 2.5, 2.75, ("r2",), ((2, 3),))
MOVES = tuple(
    KVMove(i, "r1", source, 2, 100, 1.0 + 0.1 * i, 2.0, is_committed=i != 2) for i, source in ((1, 0), (2, 1))
)
LATE = BatchSlice(10, ESPGroup((0, 2)), Phase.DECODE, 2.75, 3.0, ("r1",), ())
BEHIND = BatchSlice(11, ESPGroup((2,)), Phase.DECODE, 2.9, 2.95, ("r2",), ())  # while 0 ends the one before
HISTORY = ClusterHistory((PREFILL, CHUNK, DECODE), MOVES, {0: 100, 1: 100, 2: 100})


def events_of(history: ClusterHistory = HISTORY) -> list[dict[str, Any]]:
    events = msgspec.json.decode(chrome_trace(history))["traceEvents"]
    assert isinstance(events, list)
    return events


def slices_of(category: str) -> list[dict[str, Any]]:
    return [event for event in events_of() if event["ph"] == "X" and event["cat"] == category]


def test_times_never_go_back() -> None:
    times = [event["ts"] for event in events_of() if event["ph"] != "M"]
    assert times == sorted(times)


def test_slices_of_a_track_follow_or_hold_each_other() -> None:
    slices = [event for event in events_of() if event["ph"] == "X"]
    for track in {event["tid"] for event in slices}:
        open_ends: list[float] = []
        for event in slices:
            if event["tid"] == track:
                start, end = event["ts"], event["ts"] + event["dur"]
                open_ends = [other for other in open_ends if other > start]
                assert all(end <= other for other in open_ends)
                open_ends.append(end)


def test_a_batch_ends_on_an_instance_where_the_next_one_begins_there() -> None:
    events = [e for e in events_of(ClusterHistory((BEHIND, LATE))) if e["ph"] == "X" and e["cat"] == "batch"]
    spans = [(event["tid"], event["args"]["batch_id"], event["ts"], event["dur"]) for event in events]
    assert spans == [
        (0, 10, 2.75e6, pytest.approx(0.25e6)),
        (2, 10, 2.75e6, pytest.approx(0.15e6)),
        (2, 11, 2.9e6, pytest.approx(0.05e6)),
    ]


def test_a_group_is_one_slice_for_all_its_batches_with_any_leader() -> None:
    groups = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in slices_of("group")]
    together = [(i, "DoP 3: A+B+C", 1.5e6, 1.0e6) for i in (0, 1, 2)]
    assert groups == [*together, (2, "DoP 1: C", 2.5e6, 0.25e6)]


def test_a_batch_names_its_phase_and_its_kv_on_every_instance() -> None:
    batches = slices_of("batch")
    assert [(event["tid"], event["name"]) for event in batches if event["args"]["batch_id"] == 7] == [
        (0, "prefill"),
        (1, "prefill"),
        (2, "prefill"),
    ]
    first = batches[0]["args"]
    assert (first["dop"], first["group"], first["longest_prompt"]) == (3, [1, 0, 2], 25)
    assert (first["kv_reserved"], first["kv_used"], first["request_ids"]) == (9, 10, ["r1", "r2"])


def test_counters_report_the_kv_of_each_instance() -> None:
    counters = [(event["ts"], event["args"]) for event in events_of() if event["ph"] == "C"]
    assert (1.5e6, {"instance 0": 9}) in counters
    assert (2.0e6, {"instance 1": 20}) in counters


def test_moves_of_kv_are_arrows_between_slices_that_do_not_overlap() -> None:
    out, to = slices_of("kv_out"), slices_of("kv_in")
    assert [event["name"] for event in out] == [
        "100 KV tokens to instance 2",
        "100 KV tokens to instance 2, rolled back",
    ]
    assert len({event["tid"] for event in to}) == 2  # at once, so in two lanes
    arrows = [event for event in events_of() if event["ph"] in "sf"]
    assert [(event["ph"], event["id"]) for event in arrows] == [("s", 1), ("s", 2), ("f", 1), ("f", 2)]
    for arrow, end in zip(arrows[2:], to, strict=True):
        assert end["ts"] <= arrow["ts"] < end["ts"] + end["dur"]
        assert arrow["tid"] == end["tid"]


def test_every_track_has_a_name_and_instances_have_letters() -> None:
    events = events_of()
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] == "X"} == set(names)
    assert (names[0], names[2]) == ("instance 0 (A)", "instance 2 (C)")
    assert "instance 2: KV that moves" in names.values()


def test_letters_go_on_after_z() -> None:
    assert [letters(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
    assert len({letters(i) for i in range(800)}) == 800


def test_a_server_that_has_done_nothing_has_an_empty_trace() -> None:
    assert not [event for event in events_of(ClusterHistory()) if event["ph"] != "M"]


def test_batches_far_apart_are_groups_apart() -> None:
    later = [BatchSlice(i, ESPGroup((0,)), Phase.DECODE, float(i), i + 0.5, (), ()) for i in range(3)]
    groups = [event for event in events_of(ClusterHistory(tuple(later))) if event.get("cat") == "group"]
    assert len(groups) == 3
    assert all(after["ts"] > before["ts"] + before["dur"] for before, after in pairwise(groups))
