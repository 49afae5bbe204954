import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from profile_samples import measured_scenarios
from shared_files import shared_files

from loong.hardware.cost_model_file import write_cost_model
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.launcher.cli import main
from loong.model.tiny import CONFIG
from loong.profiling.found import Instances, found
from loong.runs.spawned_server import ENTRY
from loong.scheduler.cost.roofline import roofline

SMALL = ["--instances", "2", "--num-requests", "24", "--workload", "leval", "--seed", "3", "--jobs", "1"]
WITHOUT_PICTURES = f"import sys; sys.modules['matplotlib'] = None\n{ENTRY}"  # as `no_pictures`, in a process


@dataclass(frozen=True, slots=True)
class Simulated:
    """The files and the output of a command."""

    folder: Path
    out: str
    err: str


def simulated(folder: Path, *flags: str) -> Simulated:
    """Run a simulation into a folder that has a file of somebody else."""
    (folder / "notes.txt").touch()
    out, err = StringIO(), StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["simulate", *SMALL, *flags, "--output-dir", str(folder)]) == 0
    return Simulated(folder, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Two policies at one rate."""
    return simulated(tmp_path_factory.mktemp("single"), "--rate", "5", "--policy", "static-sp,tp")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Two policies at two rates, under two rules."""
    flags = ["--rate", "0.1,0.2", "--policy", "replicas,tp", "--slo", "tight", "--slo", "ttft:0.001"]
    return simulated(tmp_path_factory.mktemp("swept"), *flags)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide matplotlib, as where it is not installed: drawing takes most of the time of a small simulation."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def without_times_and_machine(path: Path) -> dict[str, object]:
    results: dict[str, object] = json.loads(path.read_text())
    for name in ("date", "wall_seconds", "command", "machine"):
        del results[name]
    return results


def test_one_rate_shows_each_run_and_draws_it(single: Simulated) -> None:
    printed, folder = single.out, single.folder
    assert shared_files(folder) == ["notes.txt"]
    assert printed.count("Serving Benchmark Result") == 2
    assert "completed / sent" in printed
    results = json.loads((folder / "results.json").read_text())
    assert [run["policy"] for run in results["runs"]] == ["static-sp", "tp"]
    assert results["runs"][0]["completed"] == 24
    summary = json.loads(printed.splitlines()[-1])
    assert "goodput" not in summary
    assert [(a["policy"], a["request_rate"]) for a in summary["attainment"]] == [
        ("static-sp", 5.0),
        ("tp", 5.0),
    ]
    attained = [run["slo_attainment"] for run in summary["attainment"]]
    assert attained == [run["slo_attainment"] for run in results["runs"]]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert f"Report: {folder / 'report.html'}" in printed
    assert json.loads((folder / "trace-tp.json").read_text())["traceEvents"]


def test_several_rates_and_rules_show_attainment(swept: Simulated) -> None:
    assert swept.out.count("P90 goodput") == 2
    goodputs = json.loads(swept.out.splitlines()[-1])["goodput"]
    assert [(g["policy"], g["request_rate"]) for g in goodputs] == [
        ("replicas", 0.2),
        ("tp", 0.2),
        ("replicas", 0.0),
        ("tp", 0.0),
    ]
    assert (swept.folder / "attainment-by-rate.png").read_bytes().startswith(b"\x89PNG")


def test_several_rates_show_throughput_per_gpu_against_speed(swept: Simulated) -> None:
    assert swept.out.count("output tokens/s/GPU") == 2
    document = json.loads((swept.folder / "results.json").read_text())
    for point, run in zip(document["pareto"], document["runs"], strict=True):
        assert (point["policy"], point["slo"]) == (run["policy"], run["slo"])
        assert point["output_throughput_per_unit"] == [run["output_throughput"] / run["num_devices"]] * 3
        assert point["output_throughput_per_user"] == pytest.approx([1e3 / run["median_tpot_ms"]] * 3)
    assert (swept.folder / "pareto.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["single", "swept"])
def test_what_was_written_is_reported_and_nothing_else(name: str, request: pytest.FixtureRequest) -> None:
    run: Simulated = request.getfixturevalue(name)
    [line] = (line for line in run.err.splitlines() if line.startswith("Wrote "))
    written = {path for path in run.folder.iterdir() if path.name != "notes.txt"}
    assert {Path(name) for name in line.removeprefix("Wrote ").split(", ")} == written


@pytest.mark.usefixtures("no_pictures")
def test_sessions_are_simulated_with_their_ideal_hits(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "agents", "--rate", "4", "--num-requests", "40", "--length-scale", "1/8"]
    assert main(["simulate", *SMALL, *load, "--policy", "replicas"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Successful requests:                    40" in lines
    [ideal] = (line for line in lines if line.startswith("Ideal prefix cache hits (%):"))
    assert float(ideal.split()[-1]) > 80


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("flags", "jobs"), [(["--rate", "0.1,0.2"], "1"), (["--goodput", "0.5"], "2")])
def test_each_of_several_runs_has_a_line_when_it_is_over(
    flags: list[str], jobs: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SMALL, *flags, "--policy", "replicas,tp", "--jobs", jobs]) == 0
    reported, _, _ = capfd.readouterr().out.partition("SLO: ")
    _simulated, _workload, _, *lines, _ = reported.splitlines()
    assert {line.split(" at ")[0] for line in lines} == {"replicas", "tp"}
    assert all("% of 24 within the SLO" in line for line in lines)
    assert any("% of input cached, ideal " in line for line in lines)


@pytest.mark.usefixtures("no_pictures")
def test_refused_requests_are_reported_and_count_as_misses(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "0.1,0.2", "--policy", "replicas", "--kv-cache-tokens", "12k"]
    assert main(["simulate", *SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    assert "replicas refused 12 of 24 requests: they need more KV than it gives one request" in printed
    assert json.loads(printed.splitlines()[-1])["goodput"][0]["request_rate"] == 0.0


@pytest.mark.usefixtures("no_pictures")
def test_the_same_command_writes_the_same_results(tmp_path: Path) -> None:
    for name in ("one", "two"):
        flags = ["--goodput", "0.5", "--policy", "replicas", "--output-dir", str(tmp_path / name)]
        assert main(["simulate", *SMALL, *flags]) == 0
    assert without_times_and_machine(tmp_path / "one" / "results.json") == without_times_and_machine(
        tmp_path / "two" / "results.json"
    )


@pytest.mark.usefixtures("no_pictures")
def test_a_workload_with_a_pace_of_its_own_needs_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "victim-attacker", "--num-requests", "20", "--policy", "static-sp"]
    assert main(["simulate", *flags]) == 0
    assert "> 128k" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_a_profile_says_what_is_simulated_where_no_flag_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, path = shape_of(CONFIG), tmp_path / "cost-model.json"
    prior = roofline(shape, DEVICES["cpu"], 2)
    instances = Instances("loong-tiny", shape, tp_size=2, device="cpu", num_instances=2)
    write_cost_model(found(instances, prior, measured_scenarios(prior, 0, prior, num_instances=2)), path)
    flags = ["--cost-model", str(path), "--rate", "5", "--length-scale", "1/64"]
    assert main(["simulate", *SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Simulated: loong-tiny on 2 instances of 2 x cpu; times as measured")
    assert main(["simulate", *SMALL, *flags, "--device", "h200"]) == 1
    assert (
        "measured on loong-tiny with device cpu, but is to be used with device h200"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "1", "--workload", "nonsense"], "workload 'nonsense', character 1"),
        (["--rate", "1", "--device", "nonsense"], "--device 'nonsense'"),
        (["--rate", "1", "--model", "nonsense"], "'nonsense'"),
        (["--rate", "1", "--slo", "nonsense"], "--slo: SLO 'nonsense'"),
        (["--rate", "1", "--slo", "tight", "--slo", "tight"], "--slo tight is given twice"),
        (["--rate", "1", "--slo", "ttft:20", "--slo", "ttft:20.0"], "--slo ttft:20.0 is given twice"),
        (["--rate", "1", "--seed", "-1"], "--seed -1"),
        (["--rate", "1", "--attainment", "101"], "--attainment 101"),
        (["--replay", "log", "--policy", "tp"], "no use for --policy"),
        (["--replay", "log", "--num_requests", "2"], "no use for --num-requests"),
        (["--replay", "log", "--cost-model", "x"], "no use for --cost-model"),
        (["--rate", "fast"], "--rate 'fast'"),
        (["--workload", "mixed@closed(8)"], "--workload mixed@closed(8) waits for answers"),
        (["--workload", "mixed@closed(4)", "--rate", "1"], "--workload mixed@closed(4) waits for answers"),
        (["--workload", "trace:nowhere.csv"], "nowhere.csv cannot be read"),
        (["--rate", "1", "--model", "llama-3.1-70b"], "no room for KV"),
        (["--rate", "1", "--num-instances", "3", "-tp", "3"], "--tensor-parallel-size of 3 does not divide"),
    ],
)
def test_bad_input_gives_one_clear_line(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("no_pictures")
def test_a_recorded_simulation_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    flags = ["--rate", "5", "--policy", "replicas", "--event-log", str(path)]
    assert main(["simulate", *SMALL, *flags]) == 0
    assert main(["simulate", "--replay", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith("identical: ")
    assert "breaks off" not in output.err
    path.write_bytes(path.read_bytes()[:-2])
    main(["simulate", "--replay", str(path)])
    assert f"{path} breaks off in its last line" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures")
def test_a_replay_that_plans_differently_shows_both_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    flags = ["--rate", "5", "--policy", "replicas", "--event-log", str(path)]
    assert main(["simulate", *SMALL, *flags]) == 0
    path.write_text(path.read_text().replace('"policy":"replicas"', '"policy":"static-sp"', 1))
    capsys.readouterr()
    assert main(["simulate", "--replay", str(path)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("plan 1 differs, on RequestArrived at 0.000000 s")
    assert any(line.startswith("-") for line in shown[3:])
    assert any(line.startswith("+") for line in shown[3:])


@pytest.mark.usefixtures("no_pictures")
def test_without_rates_those_around_the_predicted_capacity_are_chosen_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", *SMALL]) == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("Chosen: ")]
    rates = [float(rate) for rate in line.split()[2].rstrip(",").split(",")]
    assert f"--rate {','.join(f'{rate:g}' for rate in rates)}, which is 0.25,0.5,1,1.5 times" in line
    assert "--policy esp,esp-fixed-2,esp-disaggregated-1" in line
    goodputs = json.loads(printed.splitlines()[-1])["goodput"]
    policies = ("esp", "esp-fixed-2", "esp-disaggregated-1")
    assert [(g["policy"], g["rates"]) for g in goodputs] == [(policy, 4) for policy in policies]
    document = json.loads(Path("loong-runs/simulate-1/results.json").read_text())
    assert document["configuration"]["chosen"] == [line]
    assert sorted({run["request_rate"] for run in document["runs"]}) == rates
    assert "Report: loong-runs/simulate-1/results.json" in printed


@pytest.mark.usefixtures("no_pictures")
def test_a_second_run_into_a_folder_leaves_the_first_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "5", "--policy", "tp", "--output-dir", "run"]
    assert main(["simulate", *SMALL, *flags]) == 0
    first = Path("run/results.json").read_bytes()
    assert main(["simulate", *SMALL, *flags, "--seed", "4"]) == 0
    assert "run has the results of another run; this run goes into run-2" in capsys.readouterr().err
    assert Path("run/results.json").read_bytes() == first
    assert json.loads(Path("run-2/results.json").read_text())["configuration"]["seed"] == 4


def test_a_terminal_has_the_words_of_the_report_and_json_only_if_asked_for() -> None:
    flags = ["--rate", "5", "--policy", "replicas,tp", "--jobs", "1"]
    shown = on_a_terminal("simulate", *SMALL, *flags)
    assert shown[-1].startswith("Report: ")
    assert shown[-2].startswith("At 5 req/s, ")
    assert "Report: " in (asked := on_a_terminal("simulate", *SMALL, *flags, "--json"))[-2]
    assert json.loads(asked[-1])["workload"] == "leval"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_simulation_keeps_the_runs_that_ended_and_names_the_others(jobs: str) -> None:
    load = ["--workload", "lveval", "--rate", "1", "--num-requests", "100"]  # long, for esp
    flags = ["--policy", "static-sp,esp", *load, "--jobs", jobs]
    command = [sys.executable, "-c", WITHOUT_PICTURES, "simulate", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while " at " not in (line := process.stdout.readline()):
            assert line
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read().splitlines()
        process.wait(60)
    document = json.loads(Path("loong-runs/simulate-1/results.json").read_text())
    assert [run["policy"] for run in document["runs"]] == ["static-sp"]
    assert document["missing_runs"] == ["esp at 1 req/s under tight"]
    assert "Not simulated: esp at 1 req/s under tight" in errors
    assert process.returncode == 130
    assert not [line for line in errors if "Traceback" in line]


def on_a_terminal(*words: str) -> list[str]:
    """Return the lines that a command shows on a terminal, without empty ones."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_PICTURES, *words], stdout=terminal, stderr=subprocess.PIPE
    ):
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the end, as Linux reports it
            while received := os.read(controller, 2**16):
                shown += received
    os.close(controller)
    return [line for line in shown.decode().splitlines() if line.strip()]


def test_a_log_is_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "5", "--policy", "replicas,tp", "--event-log", str(tmp_path / "events.jsonl")]
    assert main(["simulate", *SMALL, *flags]) == 1
    assert "--event-log" in capsys.readouterr().err
