from dataclasses import replace
from pathlib import Path

from run_documents import RULE, run_row, sweep, write_run

from loong.runs.report.answer import answer, milliseconds, share
from loong.workloads.report.run_document import by_rule


def test_runs_at_one_rate_report_who_met_the_slo_the_gain_and_the_losses(tmp_path: Path) -> None:
    other = run_row("static-sp", 2.0, p99_ttft_ms=11.0, p99_e2el_ms=100.0)
    (runs,) = by_rule(write_run(tmp_path, [other, run_row("esp")]))
    reported = answer(runs)
    assert reported.winner == "esp"
    assert reported.met == "At 2 req/s, esp met the SLO for 75 % of 4 requests, static-sp for 50 %."
    assert reported.gain == (
        "Against static-sp, the best other policy, the mean TTFT of esp is 50 % lower (23.2 ms, not 46.5 ms) "
        "and the mean TPOT of esp is 50 % lower (4.12 ms, not 8.25 ms)."
    )
    assert reported.loss == (
        "esp loses most in P99 TTFT: 23.2 ms against 11 ms of static-sp; one more loss is in the report."
    )
    assert [str(loss) for loss in reported.losses] == [
        "P99 TTFT: 23.2 ms against 11 ms of static-sp",
        "P99 end-to-end latency: 124 ms against 100 ms of static-sp",
    ]


def test_a_sweep_reports_up_to_which_rate(tmp_path: Path) -> None:
    (runs,) = by_rule(sweep(tmp_path))
    reported = answer(runs)
    assert reported.met == (
        "For 50 % of all requests, the SLO was met by esp up to at least 4 req/s, the highest rate that was "
        "run; static-sp up to 1 req/s."
    )
    assert reported.gain == "That is 4 times the rate of the best other policy, static-sp."
    assert reported.loss.startswith("In none of the numbers compared is esp worse")


def test_where_no_other_reaches_the_goal_the_gain_is_at_the_same_rate(tmp_path: Path) -> None:
    document = sweep(tmp_path)
    (runs,) = by_rule(document)
    rows = [
        {"policy": found.policy, "slo": found.slo, "request_rate": 4.0 if found.policy == "esp" else 0.0}
        for found in runs.goodput
    ]
    (runs,) = by_rule(
        write_run(
            tmp_path,
            [run_row("esp", request_rate=4.0), run_row("static-sp", 8.0, request_rate=4.0)],
            goodput=rows,
        )
    )
    reported = answer(runs)
    assert "static-sp at no rate that was run" in reported.met
    assert reported.gain.startswith(
        "At 4 req/s, where esp still reached the goal, static-sp met the SLO for 0 %, and the mean"
    )


def test_repetitions_have_a_range_and_differences_within_it_are_noise(tmp_path: Path) -> None:
    rows = [
        *(
            run_row("esp", repeat=i, slo_attainment=0.9 + i / 50, p99_ttft_ms=40.0 + 9 * i, num_prompts=4 + i)
            for i in range(3)
        ),
        *(run_row("tp", 2.0, repeat=i, slo_attainment=0.5, p99_ttft_ms=44.0) for i in range(3)),
    ]
    (runs,) = by_rule(write_run(tmp_path, rows))
    reported = answer(runs)
    assert reported.met == (
        "At 2 req/s, esp met the SLO for 92 % (90 to 94) of 4 to 6 requests in each of 3 repetitions, tp for "
        "50 % (50 to 50)."
    )
    assert reported.noise == (
        "Repetitions of one policy differ by up to 4.0 points of SLO attainment; no ranges overlap."
    )
    assert reported.sentences == (reported.met, reported.noise, reported.gain, reported.loss)
    assert "P99 TTFT" not in reported.gain
    assert "P99 TTFT" not in reported.loss


def test_noise_is_where_ranges_overlap_however_far_the_repetitions_of_one_policy_differ(
    tmp_path: Path,
) -> None:
    attained = {"esp": (1.0, 1.0), "static-sp": (0.68, 0.92), "tp": (0.9, 1.0), "replicas": (0.5, 0.6)}
    rows = [
        run_row(policy, repeat=i, slo_attainment=attainment)
        for policy, attainments in attained.items()
        for i, attainment in enumerate(attainments)
    ]
    (runs,) = by_rule(write_run(tmp_path, rows))
    assert answer(runs).noise == (
        "Repetitions of one policy differ by up to 24.0 points of SLO attainment. Ranges overlap between esp "
        "and tp and between tp and static-sp: these differences are noise."
    )
    (runs,) = by_rule(write_run(tmp_path, rows[2:6]))
    assert answer(runs).noise.endswith(" Ranges overlap between tp and static-sp: this difference is noise.")
    (runs,) = by_rule(write_run(tmp_path, rows[2:4]))
    assert answer(runs).noise == ("Repetitions of one policy differ by up to 24.0 points of SLO attainment.")


def test_a_loss_to_one_policy_is_reported_where_the_best_other_is_within_noise(tmp_path: Path) -> None:
    rows = [
        *(run_row("esp", repeat=i, slo_attainment=0.9, p99_ttft_ms=50.0 + i) for i in range(2)),
        *(run_row("tp", 2.0, repeat=i, slo_attainment=0.5, p99_ttft_ms=10.0 + 60 * i) for i in range(2)),
        *(run_row("replicas", 2.0, repeat=i, slo_attainment=0.5, p99_ttft_ms=42.0) for i in range(2)),
    ]
    (runs,) = by_rule(write_run(tmp_path, rows))
    assert "P99 TTFT: 50.5 ms against 42 ms of replicas" in map(str, answer(runs).losses)


def test_where_no_difference_is_beyond_noise_that_is_what_is_claimed(tmp_path: Path) -> None:
    rows = [run_row(policy, repeat=i) for policy in ("esp", "tp") for i in range(2)]
    (runs,) = by_rule(write_run(tmp_path, rows))
    reported = answer(runs)
    assert reported.gain.endswith(
        "gains in neither TTFT nor TPOT (mean and P99), beyond the noise of repetitions."
    )
    assert reported.loss.endswith("by over 2 %, beyond the noise of repetitions.")


def test_two_that_reach_the_same_rate_are_called_so(tmp_path: Path) -> None:
    rows = [run_row(policy, request_rate=4.0) for policy in ("esp", "tp")]
    goodputs = [{"policy": policy, "slo": RULE, "request_rate": 4.0} for policy in ("esp", "tp")]
    (runs,) = by_rule(write_run(tmp_path, rows, goodput=goodputs))
    assert answer(runs).gain.startswith("That is also the rate of the best other policy, ")


def test_losses_of_a_range_of_lengths_are_reported(tmp_path: Path) -> None:
    buckets = [{"bucket": "> 128k", "sent": 1, "slo_attainment": 0.5, "p99_ttft_ms": 9000.0}]
    better = [{"bucket": "> 128k", "sent": 1, "slo_attainment": 1.0, "p99_ttft_ms": 3000.0}]
    rows = [run_row("esp", by_prompt_length=buckets), run_row("tp", 2.0, by_prompt_length=better)]
    (runs,) = by_rule(write_run(tmp_path, rows))
    assert [str(loss) for loss in answer(runs).losses] == [
        "P99 TTFT of prompts of > 128k tokens before scaling by 1/64: 9 s against 3 s of tp",
        "SLO attainment of prompts of > 128k tokens before scaling by 1/64: 50 % against 100 % of tp",
    ]
    losses = answer(replace(runs, length_scale=1.0)).losses
    assert losses[0].what == "P99 TTFT of prompts of > 128k tokens"


def test_fewer_requests_a_second_are_a_loss_though_more_met_the_slo(tmp_path: Path) -> None:
    rows = [run_row("esp", request_throughput=9.0), run_row("tp", 2.0, request_throughput=10.0)]
    (runs,) = by_rule(write_run(tmp_path, rows))
    assert "requests completed per second: 9 against 10 of tp" in map(str, answer(runs).losses)


def test_a_policy_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp")]))
    reported = answer(runs)
    assert reported.met == "At 2 req/s, esp met the SLO for 75 % of 4 requests."
    assert reported.sentences == (reported.met, "Nothing else was run.")
    assert reported.losses == ()


def test_numbers_of_an_interrupted_run_are_called_partial(tmp_path: Path) -> None:
    rows = [run_row("tp"), run_row("esp", 2.0, num_unfinished=1996)]
    (runs,) = by_rule(write_run(tmp_path, rows))
    reported = answer(runs)
    assert reported.interrupted == ("esp was interrupted at 2 req/s: its numbers are of 4 of 2,000 requests.")
    assert reported.sentences[:2] == (reported.met, reported.interrupted)


def test_of_an_interrupted_search_no_rate_is_claimed(tmp_path: Path) -> None:
    rows = [run_row("esp"), run_row("tp", num_unfinished=9)]
    goodput = [{"policy": "esp", "slo": RULE, "request_rate": 2.0, "too_high_rate": 4.0}]
    (runs,) = by_rule(write_run(tmp_path, rows, goodput=goodput))
    assert answer(runs).met.endswith("the SLO was met by esp up to 2 req/s; tp at an unknown rate.")


def test_runs_that_were_all_cut_off_have_an_answer_too(tmp_path: Path) -> None:
    rows = [run_row(policy, is_cut_off=True, attains=False) for policy in ("esp", "tp")]
    (runs,) = by_rule(write_run(tmp_path, rows))
    assert "n/a" in answer(runs).met


def test_numbers_have_the_digits_that_matter() -> None:
    assert [milliseconds(value) for value in (None, 0.0123, 4.056, 41.26, 999.0, 4056.0, 123456.0)] == [
        "n/a",
        "0.0123 ms",
        "4.06 ms",
        "41.3 ms",
        "999 ms",
        "4.06 s",
        "123 s",
    ]
    assert [share(value) for value in (None, 1.0, 0.98765)] == ["n/a", "100 %", "98.8 %"]


def test_where_no_other_was_run_at_the_rate_no_losses_are_claimed_or_denied(tmp_path: Path) -> None:
    goodput = [
        {"policy": policy, "slo": RULE, "request_rate": rate, "too_high_rate": 2 * rate}
        for policy, rate in (("esp", 4.0), ("tp", 1.0))
    ]
    rows = [run_row("esp", request_rate=4.0), run_row("tp", request_rate=1.0)]
    (runs,) = by_rule(write_run(tmp_path, rows, goodput=goodput))
    reported = answer(runs)
    assert reported.gain == "That is 4 times the rate of the best other policy, tp."
    assert reported.loss == "No other policy was run to its end at 4 req/s, so no losses are known."
