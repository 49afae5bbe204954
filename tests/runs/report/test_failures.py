"""Failed requests are reported with their reasons; without failures nothing is reported."""

from pathlib import Path

from run_documents import run_row, write_run

from loong.runs.report.failures import failures_of
from loong.runs.report.pictures import pictures_of_runs
from loong.workloads.report.run_document import by_rule


def test_reasons_are_counted_the_commonest_first(tmp_path: Path) -> None:
    full = 'HTTP 503: {"error":{"message":"the queue is full","type":"server_error"}}'
    errors = [full, "", "ConnectionResetError: gone", full]
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp", completed=1, errors=errors)]))
    (sentence,) = failures_of(runs)
    assert sentence.startswith(
        "3 of 4 requests of esp failed at 2 req/s and count as misses: 2 x HTTP 503: the"
    )
    assert sentence.endswith("full; 1 x ConnectionResetError: gone.")


def test_a_reason_that_no_document_reports_is_not_made_up(tmp_path: Path) -> None:
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp")]))
    (sentence,) = failures_of(runs)
    assert sentence.endswith("misses: no reason is known.")


def test_a_caption_speaks_of_failures_only_where_there_were_some(tmp_path: Path) -> None:
    whole = run_row("esp", completed=4, failed=0, ttfts=[0.01] * 4, tpots=[0.01] * 4)
    for row, has_failures in ((run_row("esp"), True), (whole, False)):
        (runs,) = by_rule(write_run(tmp_path, [row]))
        pictures = {picture.name: picture.words for picture in pictures_of_runs(runs, {}, None, "")}
        assert ("had failures" in pictures["latency-cdf"]) == has_failures
        assert bool(list(failures_of(runs))) == has_failures
