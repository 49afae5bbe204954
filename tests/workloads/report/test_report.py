import re

import pytest

from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import Metrics, compute_metrics
from loong.workloads.metrics.record import RequestRecord, TokenUsage
from loong.workloads.metrics.result import columns_json, metrics_json
from loong.workloads.metrics.slo import SLOLimits
from loong.workloads.report.report import format_buckets, format_comparison, format_counters, format_run
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

ASKED = 3


def make_records(*, ttft: float = 0.25) -> list[RequestRecord]:
    def record(num_prompt_tokens: int, error: str | None) -> RequestRecord:
        request = WorkloadRequest(0.0, RequestShape((TokenRun(0, num_prompt_tokens),), ASKED))
        times = () if error else (ttft, ttft + 0.5)
        usage = None if error else TokenUsage(num_prompt_tokens, len(times))
        return RequestRecord(request, 0.0, 0.0, times, 2.0, usage, error)

    return [record(1_000, None), record(40_000, None), record(200_000, "lost"), record(200_000, "lost")]


def make_metrics(*, ttft: float = 0.25) -> Metrics:
    return compute_metrics(make_records(ttft=ttft), lambda n: SLOLimits(1.0, 1.0, 10.0))


def rows(text: str) -> dict[str, str]:
    """Name to number of the lines of a block."""
    return {
        name.strip(): value.strip() for name, _, value in (line.rpartition(":") for line in text.splitlines())
    }


def test_a_block_has_the_totals_and_what_was_asked_beside_what_came() -> None:
    block = rows(format_run("esp", make_metrics(), "absolute (TTFT <= 1000 ms)"))
    assert block["Policy"] == "esp"
    assert block["Successful requests"] == "2"
    assert block["Failed requests"] == "2"
    assert block["Total generated tokens"] == "4"
    assert block["Requested output tokens"] == str(4 * ASKED)
    assert block["Request goodput (req/s)"] == "1.00"
    assert block["SLO attainment (% of all sent)"] == "50.0"
    assert block["Mean TTFT (ms)"] == "250.00"
    assert block["P99 TPOT (ms)"] == "500.00"
    assert block["SLO"] == "absolute (TTFT <= 1000 ms)"


def test_hits_of_the_prefix_cache_stand_beside_the_ideal_ones() -> None:
    shape = RequestShape((TokenRun(1, 1_000),), ASKED)

    def metrics(num_cached_tokens: int | None) -> Metrics:
        records = [
            RequestRecord(WorkloadRequest(0.0, shape), 0.0, time, (1.0, 1.5), 2.0, usage, None)
            for time, usage in (
                (0.0, TokenUsage(1_000, 2, 0)),
                (0.5, TokenUsage(1_000, 2, num_cached_tokens)),
            )
        ]
        return compute_metrics(records, None)

    block, document = rows(format_run("esp", metrics(500), None)), metrics_json(metrics(500))
    assert block["Prefix cache hits (% of input)"] == "25.0"
    assert block["Ideal prefix cache hits (%)"] == "50.0"
    assert (document["total_cached_tokens"], document["ideal_cached_tokens"]) == (500, 999)
    assert (document["prefix_hit_rate"], document["ideal_prefix_hit_rate"]) == (0.25, 0.4995)


def test_hits_that_no_answer_reports_are_not_zeros() -> None:
    metrics = make_metrics()
    assert rows(format_run("esp", metrics, None))["Prefix cache hits (% of input)"] == "n/a"
    assert metrics_json(metrics)["prefix_hit_rate"] is None


def test_a_block_without_a_rule_says_nothing_of_goodput() -> None:
    text = format_run("esp", compute_metrics(make_records(), None), None)
    assert "goodput" not in text
    assert "SLO" not in text


def test_numbers_that_do_not_exist_are_not_zeros() -> None:
    text = format_run("esp", compute_metrics(make_records()[2:], None), None)
    assert rows(text)["Mean TTFT (ms)"] == "n/a"


def test_small_numbers_keep_two_digits() -> None:
    block = rows(format_run("esp", make_metrics(ttft=0.25), None))
    assert block["Median input (ms)"] == "0.13"
    assert block["P90 normalized (ms)"] == "0.68"
    assert rows(format_run("esp", make_metrics(ttft=1e-6), None))["Mean TTFT (ms)"] == "0.001"


def test_buckets_that_were_sent_nothing_are_left_out() -> None:
    text = format_buckets(make_metrics())
    assert [line.split("  ")[0] for line in text.splitlines()[2:]] == ["< 4k", "32-128k", "> 128k"]
    assert "100.0" in text.splitlines()[2]
    assert "0.0" in text.splitlines()[4]


def test_policies_stand_side_by_side_in_aligned_columns() -> None:
    text = format_comparison({"esp": [make_metrics()], "static-sp": [make_metrics(ttft=0.75)]})
    lines = text.splitlines()
    assert lines[0].split() == ["esp", "static-sp"]
    assert len({len(line) for line in lines}) == 1
    [row] = [line for line in lines if line.startswith("TTFT median")]
    assert row.split()[-2:] == ["250.00", "750.00"]


def test_repeated_runs_are_reported_by_their_median_and_range() -> None:
    repeats = [make_metrics(ttft=ttft) for ttft in (0.25, 1.0, 0.5)]
    text = format_comparison({"esp": repeats})
    [row] = [line for line in text.splitlines() if line.startswith("TTFT median")]
    assert row.split()[-2:] == ["500.00", "(250.00-1000.00)"]
    assert re.search(r"^completed / sent in all repetitions +6/12$", text, re.MULTILINE)


def test_bars_are_as_long_as_their_counts() -> None:
    text = format_counters(ServerCounters(num_batches_by_dop={1: 40, 2: 0, 4: 10}, num_scale_ups=1234))
    bars = {line.split()[1]: line.count("#") for line in text.splitlines() if "DoP " in line}
    assert bars == {"1": 40, "4": 10}
    assert "1,234" in text


def test_the_time_of_two_prompt_groups_is_a_share_of_the_busy_time() -> None:
    text = format_counters(ServerCounters(busy_seconds=8.0, two_prompt_groups_seconds=1.0))
    assert text.split()[-1] == "12.5"


def test_what_the_server_did_not_count_is_not_in_the_report() -> None:
    assert format_counters(ServerCounters()) == ""
    assert "migrated" not in format_counters(ServerCounters(num_scale_ups=0))


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "e2el"])
@pytest.mark.parametrize("statistic", ["mean", "median", "std", "p90", "p95", "p99"])
def test_results_have_vllms_keys(name: str, statistic: str) -> None:
    assert isinstance(metrics_json(make_metrics())[f"{statistic}_{name}_ms"], float)


def test_results_have_vllms_totals() -> None:
    result = metrics_json(make_metrics())
    assert result["completed"] == 2
    assert result["failed"] == 2
    assert result["duration"] == 2.0
    assert result["total_input_tokens"] == 41_000
    assert result["total_output_tokens"] == 4
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 20_502.0
    assert result["request_goodput"] == 1.0


def test_each_request_has_an_entry_in_every_column() -> None:
    columns = columns_json(make_records(), lambda n: SLOLimits(0.5, 1.0, 10.0))
    assert {len(column) for column in columns.values()} == {4}  # type: ignore[arg-type]  # lists all
    assert columns["errors"] == ["", "", "lost", "lost"]
    assert columns["ttfts"] == [0.25, 0.25, None, None]
    assert columns["slo_ratios"] == [0.5, 0.5, None, None]
