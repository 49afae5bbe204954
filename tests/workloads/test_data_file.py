from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.errors import ConfigError
from loong.workloads.data_file import DataFile
from loong.workloads.datasets.saved import read_saved, save_requests
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest
from loong.workloads.workload import Pace, endless_workload, make_workload, origin_of, pace_of

runs = st.builds(TokenRun, st.integers(0, 2**63 - 1), st.integers(1, 10_000_000))
shapes = st.builds(
    RequestShape, st.lists(runs, min_size=1, max_size=3).map(tuple), st.integers(1, 10_000), st.text()
)
requests = st.lists(
    st.builds(WorkloadRequest, st.floats(0, 1e9, allow_nan=False), shapes), min_size=1, max_size=8
).map(lambda sent: sorted(sent, key=lambda request: request.arrival_time))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "burst.csv"
    lines = ["Timestamp,Request tokens,Response tokens", "100,10,5", "104,20,6", "102,30,7"]
    path.write_text("\n".join(lines))
    return f"trace:{path}"


@given(sent=requests)
def test_what_is_saved_is_loaded_exactly(
    tmp_path_factory: pytest.TempPathFactory, sent: list[WorkloadRequest]
) -> None:
    path = tmp_path_factory.mktemp("saved") / "requests.jsonl"
    assert save_requests(path, sent) == len(sent)
    assert [WorkloadRequest(row.time or 0.0, row.shape) for row in read_saved(path).rows] == sent
    assert make_workload(f"trace:{path}", len(sent), seed=9) == sent


@pytest.mark.parametrize(
    "text",
    [
        "mixed@poisson(2)",
        "shared-prefix@gamma(1,0.5)",
        "victim-attacker",
        "agents@poisson(3)",
        "0.5*chats+0.5*fixed(9)@poisson(3)",
    ],
)
def test_a_saved_workload_is_that_workload(tmp_path: Path, text: str) -> None:
    sent = make_workload(text, 50, seed=4)
    path = tmp_path / "requests.jsonl"
    save_requests(path, sent)
    assert make_workload(f"trace:{path}", 50, seed=5) == sent


def test_a_trace_is_replayed_by_its_time_stamps_from_0_in_order(trace: str) -> None:
    sent = make_workload(trace, 3, seed=0)
    assert [(r.arrival_time, r.num_prompt_tokens, r.num_output_tokens) for r in sent] == [
        (0.0, 10, 5),
        (2.0, 30, 7),
        (4.0, 20, 6),
    ]
    assert [r.arrival_time for r in make_workload(f"{trace}@replay(4)", 3, seed=0)] == [0.0, 0.5, 1.0]


def test_a_replay_at_a_rate_keeps_the_pattern_and_with_a_burstiness_does_not(trace: str) -> None:
    assert pace_of(trace) == Pace(0.5, None)
    assert pace_of(f"{trace}@replay(3)") == Pace(1.5, None)
    assert [r.arrival_time for r in make_workload(trace, 3, seed=0, request_rate=1.0)] == [0.0, 1.0, 2.0]
    constant = make_workload(trace, 3, seed=0, request_rate=2.0, burstiness=float("inf"))
    assert [(r.arrival_time, r.num_prompt_tokens) for r in constant] == [(0.0, 10), (0.5, 20), (1.0, 30)]


def test_a_trace_may_come_at_another_pace_in_its_own_order(trace: str) -> None:
    sent = make_workload(f"{trace}@constant(2)", 3, seed=0)
    assert [(r.arrival_time, r.num_prompt_tokens) for r in sent] == [(0.0, 10), (0.5, 20), (1.0, 30)]


def test_requests_of_one_moment_come_at_once_at_any_rate(tmp_path: Path) -> None:
    path = tmp_path / "once.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n7,10,5\n7,20,6\n")
    assert pace_of(f"trace:{path}").request_rate == float("inf")
    for rate in (None, float("inf")):
        sent = make_workload(f"trace:{path}", 2, seed=0, request_rate=rate)
        assert [request.arrival_time for request in sent] == [0.0, 0.0]


def test_the_seed_chooses_the_tokens_of_a_trace(trace: str) -> None:
    one, same, other = (make_workload(trace, 3, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert {r.shape.new_runs[0].seed for r in one}.isdisjoint(r.shape.new_runs[0].seed for r in other)


def test_more_requests_than_a_file_has_are_refused(trace: str) -> None:
    with pytest.raises(ConfigError, match="--num-requests 4 is more than the 3 that trace:"):
        make_workload(trace, 4, seed=0)
    assert len(list(endless_workload(trace, seed=0))) == 3


def test_a_data_set_without_times_begins_where_the_seed_says_and_ends_after_a_round(tmp_path: Path) -> None:
    path = tmp_path / "lveval.jsonl"
    lines = [f'{{"context": "{"word" * size}", "input": "", "answers": ["x"]}}' for size in range(10, 20)]
    path.write_text("\n".join(lines))
    orders = []
    for seed in range(8):
        shapes = DataFile(str(path)).shapes(np.random.SeedSequence(seed))
        orders.append([shape.prompt[0].num_tokens for shape in shapes])
        start = orders[-1].index(11)
        assert [*orders[-1][start:], *orders[-1][:start]] == list(range(11, 21))
    assert len({order[0] for order in orders}) > 2
    with pytest.raises(ConfigError, match=r"is LV-Eval, which has no times to replay; give poisson\(RATE\)"):
        make_workload(f"trace:{path}@replay", 3, seed=0)
    assert pace_of(f"trace:{path}") == Pace(float("inf"), 1.0)


def test_a_report_says_where_lengths_come_from() -> None:
    assert origin_of("mixed") == "lengths from built-in distributions"
    assert origin_of("sharegpt+trace:a.csv+trace:b.csv") == "lengths from a.csv, b.csv"
