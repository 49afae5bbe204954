import contextlib
import http.client
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_files import shared_files

from loong.core.errors import ConfigError
from loong.launcher.bench import command as bench
from loong.launcher.parser import CommandParser
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.datasets.saved import save_requests
from loong.workloads.errors import ServerUnusableError
from loong.workloads.workload import make_workload

pytestmark = pytest.mark.usefixtures("stub_server")
DESCRIPTION = Path(__file__).parents[3] / "docs" / "benchmarking.md"
FEW = ["--length-scale", "1/64", "--num-requests", "9", "--num-warmups", "1", "--seed", "1"]
QUICK = [*FEW, "--request-rate", "inf"]


def run_bench(*flags: str) -> int:
    """Run a benchmark of the policy or the server that the flags name, or of `esp` alone."""
    if "--policy" not in flags and "--base-url" not in flags:
        flags = (*flags, "--policy", "esp")
    parser = CommandParser(prog="loong")
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *flags])
    code: int = args.run(args)
    return code


def last_line(text: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(text.splitlines()[-1])
    return summary


def test_two_policies_are_measured_compared_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    code = run_bench(*QUICK, "--policy", "esp,static-sp", "--output-dir", str(tmp_path))
    printed, reported = capsys.readouterr()
    assert "notes.txt" not in reported
    assert shared_files(tmp_path) == ["notes.txt"]
    assert f"{tmp_path}/server-esp.log, {tmp_path}/server-static-sp.log\n" in reported
    assert code == 0
    assert printed.count("Serving Benchmark Result") == 2
    assert printed.startswith(
        "Workload: mixed (lengths from built-in distributions, scale 0.015625), 9 requests all at once"
    )
    assert "DoP 2" in printed
    assert "Unloaded prefill of n tokens" in printed
    assert "KV tokens migrated" not in printed  # the stub does not count them
    summary = last_line(printed)
    assert {name: run["completed"] for name, run in summary["runs"].items()} == {"esp": 9, "static-sp": 9}
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["policy"] for run in results["runs"]] == ["esp", "static-sp"]
    assert [run["num_batches_by_dop"] for run in results["runs"]] == [{"1": 0, "2": 9}] * 2
    assert results["configuration"]["workload"] == "mixed"
    assert results["machine"]["num_cores"]
    assert results["runs"][0]["input_lens"] == results["runs"][1]["input_lens"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "static-sp" in (tmp_path / "timeline.svg").read_text()
    assert "met the SLO for 100 % of 9 requests" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "server-esp.log").is_file()


def test_sessions_are_sent_turn_by_turn_and_their_ideal_hits_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chats.jsonl"
    drawn = make_workload("chats", 12, seed=1, length_scale=1 / 16)
    quick = [
        replace(request, shape=replace(shape, turn=shape.turn and replace(shape.turn, think_time=0.001)))
        for request, shape in ((request, request.shape) for request in drawn)
    ]
    save_requests(file, quick)
    flags = (
        "--workload",
        f"trace:{file}",
        "--num-requests",
        "12",
        "--request-rate",
        "inf",
        "--length-scale",
        "1",
    )
    assert run_bench(*flags, "--num-warmups", "1", "--output-dir", str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "Prefix cache hits (% of input):         n/a" in printed
    assert last_line(printed)["runs"]["esp"]["completed"] == 12
    [run] = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    assert run["input_lens"] == [request.num_prompt_tokens for request in quick]
    assert run["ideal_prefix_hit_rate"] > 0.4
    assert "the same of an unlimited cache" in (tmp_path / "run" / "report.html").read_text()


def test_a_server_that_is_already_there_is_measured_by_new_prompts_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL_AGAIN", "1")
    with spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as base_url:
        for _ in range(2):
            assert run_bench(*QUICK, "--base-url", f"{base_url}/v1/", "--goodput", "ttft:60000") == 0
    printed = capsys.readouterr().out
    assert "Server:" in printed
    assert "Policy:" not in printed
    summary = last_line(printed)
    assert summary["slo"] == "absolute"
    assert summary["runs"][base_url]["slo_attainment"] == 1.0


def test_failed_requests_are_misses_and_make_the_exit_code_nonzero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAIL_OVER", "100")
    code = run_bench(*QUICK, "--goodput", "ttft:60000", "--num-warmups", "0")
    printed = capsys.readouterr().out
    run = last_line(printed)["runs"]["esp"]
    assert code == 1
    assert run["failed"] > 0
    assert run["slo_attainment"] == run["completed"] / 9
    assert "stub is out of room" in printed


def test_what_was_measured_is_kept_when_a_later_policy_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAIL_TO_START_AS", "replicas")
    flags = ["--policy", "esp,replicas,static-sp"]
    with pytest.raises(ServerUnusableError, match="--policy replicas"):
        run_bench(*QUICK, *flags, "--output-dir", str(tmp_path))
    captured = capsys.readouterr()
    assert "Not measured to the end: replicas, static-sp" in captured.err
    assert list(last_line(captured.out)["runs"]) == ["esp"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["policy"], run["completed"]) for run in results["runs"]] == [("esp", 9)]
    assert results["configuration"]["policies"] == ["esp", "replicas", "static-sp"]
    assert (tmp_path / "timeline.png").is_file()


def test_what_is_not_given_is_chosen_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_bench("--workload", "leval", "--duration", "1", "--num-warmups", "0") == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("Chosen: ")]
    assert "--length-scale 1, the largest power of two by which all requests fit 1,000,000 tokens" in line
    assert "--request-rate 200, two thirds of the 3e+02 req/s that the test says stubs have" in line
    assert line.endswith("Give these flags to choose otherwise.")
    document = json.loads(Path("loong-runs/bench-1/results.json").read_text())
    assert document["configuration"]["chosen"] == [line]
    assert document["configuration"]["rates"] == [200.0]
    assert "At 200 req/s, esp met the SLO for " in printed
    assert "Chosen: --length-scale 1, the largest" in Path("loong-runs/bench-1/report.html").read_text()
    assert "Report: loong-runs/bench-1/report.html" in printed.splitlines()[-2]


def test_the_capacity_of_a_server_that_is_there_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ServerConfig(None, 2, 1, ("--max-model-len", "9000"), 60.0)
    with spawn_server(config, "esp", tmp_path / "log") as url:
        flags = ["--base-url", url, "--num-requests", "9", "--num-warmups", "0"]
        assert run_bench(*flags, "--workload", "fixed(40000,4)") == 0
    printed = capsys.readouterr().out
    assert f"req/s that {url} was measured to have as capacity" in printed
    document = json.loads(Path("loong-runs/bench-1/results.json").read_text())
    assert document["configuration"]["length_scale"] == 1 / 8  # a quarter has 10,001 tokens


def test_all_servers_are_asked_before_the_first_is_measured(
    tmp_path: Path,
) -> None:
    with (
        spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as url,
        spawn_server(
            ServerConfig(None, 2, 1, ("--max-model-len", "100"), 60.0), "esp", tmp_path / "short"
        ) as short,
    ):
        with pytest.raises(ConfigError, match="the model takes 100"):
            run_bench(*QUICK, "--base-url", url, "--base-url", short)
        status = http.client.HTTPConnection(url.removeprefix("http://"))
        status.request("GET", "/metrics")
        assert b"loong:esp_scale_up_total 0\n" in status.getresponse().read()
        status.close()
    assert not Path("loong-runs").exists()


def test_an_interrupted_run_keeps_what_has_ended_and_names_what_is_missing() -> None:
    load = ["--length-scale", "1/64", "--num-requests", "1000", "--request-rate", "20", "--num-warmups", "0"]
    flags = [*load, "--goodput", "ttft:60000", "--policy", "esp,static-sp", "--repeat", "2"]
    shown = b""
    with on_a_terminal(bench_with_stubs(*flags)) as (process, terminal):
        while b" attained " not in shown:
            shown += os.read(terminal, 2**16)
        assert b" running, " in shown
        assert b" waiting, " in shown
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while received := os.read(terminal, 2**16):
                shown += received
    assert process.returncode == 130
    document = json.loads(Path("loong-runs/bench-1/results.json").read_text())
    [run] = document["runs"]
    assert 0 < run["completed"] < 1000
    assert run["completed"] + run["num_unfinished"] == 1000
    assert not run["attains"]
    missing = [f"{policy}, repetition {number}" for policy in ("esp", "static-sp") for number in (1, 2)]
    assert document["missing_runs"] == missing
    text = shown.decode()
    assert f"Not measured to the end: {', '.join(missing)}" in text
    measured = f"its numbers are of {run['completed']} of 1,000 requests."
    assert f"esp was interrupted at 20 req/s: {measured}" in text
    assert f"Interrupted: {run['num_unfinished']} more requests had not ended" in text
    assert "Report: loong-runs/bench-1/report.html" in text
    assert "Traceback" not in text


def bench_with_stubs(*flags: str) -> list[str]:
    """Run a benchmark in a process of its own that starts stubs for servers."""
    launcher, support = str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "support")
    program = (
        f"import sys; sys.path[:0] = [{launcher!r}, {support!r}]; import conftest, pytest\n"
        "conftest.serve_stubs(pytest.MonkeyPatch())\n"
        "from loong.launcher.cli import main; raise SystemExit(main())"
    )
    return [sys.executable, "-c", program, "bench", *flags]


@contextlib.contextmanager
def on_a_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a command that shows what it does on a terminal of 150 columns, and that terminal's other end."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, 150))
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, start_new_session=True) as process:
        os.close(terminal)
        try:
            yield process, controller
        finally:
            process.terminate()
    os.close(controller)


def test_nothing_runs_if_a_later_policy_cannot(tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    with pytest.raises(ConfigError, match="policy esp-fixed-3 "):
        run_bench(*QUICK, "--policy", "esp,esp-fixed-3", "--output-dir", str(output_dir))
    assert not output_dir.exists()


def test_rates_are_swept_and_repeated_with_seeds_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["--request-rate", "100:300:100", "--repeat", "2", "--goodput", "ttft:60000"]
    assert run_bench(*QUICK, *rates, "--policy", "esp,static-sp", "--output-dir", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "100.0 (100.0-100.0)" in printed
    goodputs = last_line(printed)["goodput"]
    assert [(g["policy"], g["request_rate"]) for g in goodputs] == [("esp", 300.0), ("static-sp", 300.0)]
    results = json.loads((tmp_path / "results.json").read_text())
    of_esp = [run for run in results["runs"] if run["policy"] == "esp"]
    assert [(run["request_rate"], run["repeat"], run["seed"]) for run in of_esp] == [
        (100.0, 0, 1),
        (100.0, 1, 2),
        (200.0, 0, 1),
        (200.0, 1, 2),
        (300.0, 0, 1),
        (300.0, 1, 2),
    ]
    assert of_esp[0]["requested_input_lens"] == of_esp[2]["requested_input_lens"]
    assert of_esp[0]["requested_input_lens"] != of_esp[1]["requested_input_lens"]
    assert (tmp_path / "attainment-by-rate.png").is_file()


def test_repeated_runs_at_one_rate_are_compared_by_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(*QUICK, "--repeat", "3", "--goodput", "ttft:60000") == 0
    printed = capsys.readouterr().out
    assert printed.count("Serving Benchmark Result") == 3
    assert "27/27" in printed
    assert last_line(printed)["num_repeats"] == 3


def test_the_goodput_is_searched_from_the_rate_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    rate = ["--request-rate", "50", "--find-goodput", "0.5", "--attainment", "100"]
    assert run_bench(*QUICK, *rate, "--policy", "esp", "--goodput", "ttft:0.000001") == 0
    [found] = last_line(capsys.readouterr().out)["goodput"]
    assert (found["request_rate"], found["rates"]) == (0.0, 13)
    assert found["too_high_rate"] == 50 / 2**12


def test_the_all_class_goodput_is_searched_and_its_document_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--length-scale", "1/64", "--num-requests", "60", "--num-warmups", "0", "--request-rate", "200"]
    goal = ["--find-goodput", "1", "--per-class", "--goodput", "ttft:60000"]
    assert run_bench(*load, *goal, "--policy", "esp", "--output-dir", str(tmp_path)) == 0
    [found] = last_line(capsys.readouterr().out)["goodput"]
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    # A slow machine attains less, so the law is that the search found the best of what it measured.
    attained = [run["request_rate"] for run in runs if run["attains"]]
    assert found["request_rate"] == max(attained, default=0.0)
    first = runs[0]
    assert (found["is_per_class"], first["is_per_class"], first["request_rate"]) == (True, True, 200)
    assert first["capacity_share"] is None  # the stub does not say how many devices it has
    assert first["is_stable"] == (
        first["backlog"]["at_end"] <= first["backlog"]["at_half"] + first["backlog"]["allowance"]
    )


def test_named_servers_are_measured_in_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(None, 2, 1, (), 60.0)
    with (
        spawn_server(config, "esp", tmp_path / "one") as one,
        spawn_server(config, "esp", tmp_path / "two") as two,
    ):
        flags = ["--base-url", f"one={one}", "--base-url", two, "--goodput", "ttft:60000"]
        assert run_bench(*QUICK, *flags, "--output-dir", str(tmp_path / "out")) == 0
    assert list(last_line(capsys.readouterr().out)["runs"]) == ["one", two]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(run["policy"], run["server"]["base_url"]) for run in results["runs"]] == [
        ("one", one),
        (two, two),
    ]


def test_servers_of_different_kinds_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as url:
        servers = ["--base-url", f"ours={url}", "--base-url", f"theirs={url}"]
        kinds = ["--backend", "openai", "--backend", "lightllm"]
        assert run_bench(*QUICK, *servers, *kinds, "--goodput", "ttft:60000") == 0
    runs = last_line(capsys.readouterr().out)["runs"]
    assert [(name, run["completed"]) for name, run in runs.items()] == [("ours", 9), ("theirs", 9)]


def test_what_a_run_of_a_duration_sends_depends_on_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--length-scale", "1/64", "--num-warmups", "1", "--goodput", "ttft:60000"]
    assert run_bench(*flags, "--duration", "0.3", "--request-rate", "100") == 0
    completed = last_line(capsys.readouterr().out)["runs"]["esp"]["completed"]
    assert 15 < completed < 50


def test_the_document_has_what_its_description_promises(tmp_path: Path) -> None:
    assert run_bench(*QUICK, "--slo", "tight", "--slo-scale", "100", "--output-dir", str(tmp_path)) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    description = DESCRIPTION.read_text()
    assert list(document)[-1] == "runs"
    [run] = document["runs"]
    for key in [*document, "slo_ratios", "arrival_times", "requested_output_lens", "trace", "attains"]:
        assert f"`{key}`" in description
    assert document["slos"][0]["description"] == run["slo"]
    assert (document["schema_version"], document["kind"]) == (1, "bench")
    assert {len(run[key]) for key in ("ttfts", "tpots", "slo_ratios", "errors", "start_times")} == {9}
    assert run["slo_attainment"] == sum(ratio is not None and ratio <= 1 for ratio in run["slo_ratios"]) / 9


def test_a_closed_loop_needs_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(*QUICK, "--workload", "leval", "--max-concurrency", "2", "--goodput", "e2el:60000") == 0
    assert last_line(capsys.readouterr().out)["workload"] == "leval"


def test_a_spec_says_how_many_are_in_flight_and_at_what_pace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*FEW, "--goodput", "e2el:60000"]
    assert run_bench(*flags, "--workload", "fixed(640,128)@closed(2)") == 0
    printed = capsys.readouterr().out
    assert "Workload: fixed(640,128)@closed(2) (lengths from built-in" in printed
    assert "9 requests all at once, at most 2 in flight, seed 1" in printed
    assert last_line(printed)["workload"] == "fixed(640,128)@closed(2)"
    run_bench(*flags, "--workload", "sharegpt@gamma(90,0.5)", "--max-concurrency", "3")
    assert "at 90 req/s (burstiness 0.5), at most 3 in flight" in capsys.readouterr().out


def test_a_saved_workload_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved.jsonl"
    save_requests(path, make_workload("fixed(640,128)@constant(100)", 9, seed=3))
    flags = ["--length-scale", "1/64", "--goodput", "e2el:60000"]
    assert run_bench(*flags, "--workload", f"trace:{path}@replay(2)") == 0
    assert (
        f"(lengths from {path}, scale 0.015625), 9 requests at 200 req/s (replayed)"
        in capsys.readouterr().out
    )


def test_secrets_are_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1")
    monkeypatch.setattr(
        "sys.argv", ["loong", "bench", "--extra-server-args=--api-key sk-secret-2 --admin-key 'sk-secret 3'"]
    )
    with spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as base_url:
        run_bench(*QUICK, "--base-url", base_url, "--output-dir", str(tmp_path / "out"))
    text = (tmp_path / "out" / "results.json").read_text()
    assert "--api-key" in text
    assert "sk-secret" not in text


def test_a_workload_too_long_for_the_model_is_refused_with_a_scale_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"--length-scale at least \d+ times smaller"):
        run_bench("--num-requests", "3", "--length-scale", "1", "--extra-server-args=--max-model-len 4000")


def test_a_server_that_fails_the_warm_up_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAIL_OVER", "1")
    with pytest.raises(ServerUnusableError, match=r"warm-up request .* failed: .*out of room"):
        run_bench(*QUICK, "--workload", "lveval")


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as base_url:
        pass
    with pytest.raises(ServerUnusableError, match=f"no server answers at {base_url}: "):
        run_bench(*QUICK, "--base-url", base_url)


def test_a_model_that_is_not_served_is_named_beside_those_that_are(tmp_path: Path) -> None:
    with (
        spawn_server(ServerConfig(None, 2, 1, (), 60.0), "esp", tmp_path / "log") as base_url,
        pytest.raises(ServerUnusableError, match=r"--model 'other' is not served .* served: stub"),
    ):
        run_bench(*QUICK, "--base-url", base_url, "--model", "other")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--base-url", "localhost:8000"], "--base-url 'localhost:8000'"),
        (["--base-url", "http://localhost:1", "--policy", "esp"], "--policy esp"),
        (["--base-url", "a=http://x:1", "--base-url", "a=http://x:2"], "--base-url names a twice"),
        (["--backend", "lightllm"], "--backend lightllm"),
        (
            ["--base-url", "http://x:1", "--backend", "openai", "--backend", "lightllm"],
            "--backend is given 2",
        ),
        (["--find-goodput", "--request-rate", "inf"], "--find-goodput needs a --request-rate"),
        (["--duration", "3", "--request-rate", "inf"], "--duration 3 needs a --request-rate"),
        (["--attainment", "101"], "--attainment 101"),
        (["--per-class", "--duration", "3", "--request-rate", "2"], "--per-class sends the same requests"),
        (["--request-rate", "2:inf:1"], "--request-rate '2:inf:1'"),
        (["--slo", "loongserve-10", "--workload", "zipf1.0"], "--slo: SLO loongserve-10"),
        (["--slo", "swift"], "--slo: SLO 'swift'"),
        (["--goodput", "ttft:1", "tpot"], "--goodput: SLO 'tpot'"),
        (["--request-rate", "0"], "--request-rate '0'"),
        (["--burstiness", "-1", "--request-rate", "2"], "--burstiness -1"),
        (["--num-requests", "0"], "--num-requests 0"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--num-warmups", "-1"], "--num-warmups -1"),
        (["--vocab-size", "0"], "--vocab-size 0"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--start-timeout", "0"], "--start-timeout 0"),
        (["--num-instances", "0"], "--num-instances 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--output-dir", "/dev/null/report"], "--output-dir /dev/null/report"),
    ],
)
def test_a_flag_that_cannot_work_is_named(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_bench(*flags)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--extra-server-args='--api-key", '--extra-server-args: "\'--api-key" cannot be split into words'),
        ("--extra-body={temperature: 1}", "--extra-body: '{temperature: 1}' is not a JSON object"),
        ("--extra-body=[1]", "--extra-body: '[1]' is not a JSON object"),
        ('--extra-body={"stream": false, "seed": 1}', "--extra-body: stream cannot be set"),
    ],
)
def test_words_that_cannot_be_read_are_refused_with_their_flag(
    flag: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_bench(flag)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1/2", "1/0", "tiny"])
def test_a_scale_that_is_no_ratio_is_refused_with_its_flag(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_bench(f"--length-scale={value}")
    assert f"--length-scale: {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "flags"),
    [
        ("loongserve-10", "--target-tpot 0.36"),
        ("tight", "--target-ttft 1 --target-tpot 0.05 --ttft-factor 5"),
    ],
)
def test_servers_plan_for_the_bounds_of_a_rule(tmp_path: Path, rule: str, flags: str) -> None:
    assert run_bench(*QUICK, "--workload", "mixed", "--slo", rule, "--output-dir", str(tmp_path)) == 0
    [run] = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert flags in run["server"]["extra_arguments"]
