"""The common behavior of all commands."""

import json
import os
import signal
import subprocess
import sys

import pytest
from served import free_port

from loong.launcher.cli import COMMANDS, build_parser, main
from loong.launcher.serve.command import check_names
from loong.runs.spawned_server import ENTRY

DESCRIBE = ("workload", "describe", "mixed", "--num-requests", "3")


def loong_with(redirections: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command by a shell with these redirections."""
    script = f'exec "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", ENTRY, *words],
        env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("redirections", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(redirections: str) -> None:
    result = loong_with(redirections, *DESCRIBE)
    assert (result.returncode, result.stderr) == (0, "")
    assert ("Workload: mixed" in result.stdout) == (">&-" not in redirections)


@pytest.mark.parametrize("words", [("serve", "--help"), DESCRIBE])
@pytest.mark.parametrize("is_unbuffered", ["", "1"])
def test_output_that_finds_no_room_ends_a_command_with_one_line(
    words: tuple[str, ...], is_unbuffered: str
) -> None:
    result = loong_with(">/dev/full", *words, PYTHONUNBUFFERED=is_unbuffered)
    assert result.stderr == "loong: error: output cannot be written: No space left on device\n"
    assert result.returncode == 1


def test_a_reader_that_has_seen_enough_ends_a_command() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    result = subprocess.run(
        [sys.executable, "-c", ENTRY, *DESCRIBE], stdout=writing_end, stderr=subprocess.PIPE, check=False
    )
    os.close(writing_end)
    assert result.returncode == 128 + signal.SIGPIPE
    assert not result.stderr


def test_a_reader_that_has_seen_enough_ends_a_command_of_several_processes() -> None:
    words = ("simulate", "--num-requests", "3", "--rate", "1,2,3,4", "--jobs", "2")
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, *words],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as simulating:
        assert simulating.stdout is not None
        assert simulating.stderr is not None
        assert simulating.stdout.readline().startswith("Simulated")
        simulating.stdout.close()
        reported = simulating.stderr.read()
    assert "Not simulated" in reported
    assert "Error" not in reported
    assert simulating.returncode == 128 + signal.SIGPIPE


def said_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a wrong command is answered with."""
    with pytest.raises(SystemExit, match="2"):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sevre",), "did you mean serve?"),
        (("serve", "--prot", "5"), "there is no flag --prot; did you mean --port?"),
        (("serve", "--num_instance=5"), "did you mean --num-instances?"),
        (("serve", "--policy", "replica"), "did you mean replicas?"),
        (("serve", "--policy", "esp-fixed-x"), "did you mean esp-fixed-N? N is a number of instances that"),
        (("simulate", "--policy", "replica"), "did you mean replicas?"),
        (("bench", "--policy", "esp,replica"), "did you mean replicas?"),
        (("simulate", "--policy", ""), "--policy: it needs one name or several with commas"),
        (("bench", "--policy", "esp,,tp"), "--policy: it needs one name or several with commas"),
        (("bench", "--policy", "esp,esp"), "--policy: esp,esp names a policy twice"),
        (("serve", "--num-inst", "5"), "there is no flag --num-inst;"),  # no abbreviations
        (("serve", "a", "b"), "'b' is one argument too many"),
        (("serve", "--xyzzy"), "there is no flag --xyzzy ("),
        (("bench", "--max-model-len", "1k"), "take it in --extra-server-args='--max-model-len ...'"),
        (("bench", "--reqest-rate", "1"), "did you mean --request-rate?"),
        (("workload", "describe", "--sed", "5"), "did you mean --seed?"),
        (("serve", "--max-num-seqs", "5"), "which vLLM has, and nothing stands in its place: what fits into"),
        (("serve", "--data-parallel-size", "5"), "which vLLM has; write --num-instances: replicas"),
        (("bench", "--dataset-name", "random"), "which vLLM has; write --workload: sharegpt"),
        (("bench", "--enable-lora"), "nothing stands in its place: there are no LoRA adapters"),
        (("serve", "--distant"), "there is no flag --distant ("),  # no guess
        (("serve", "a", "--model", "b"), "the model is a already, and cannot be b, too"),
    ],
)
def test_what_was_meant_is_reported(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in said_of(capsys, *words)


def test_a_model_that_is_taken_for_its_name_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--served-model-name", "a", "./b"]) == 1
    assert "took ./b for a name; write MODEL before the flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--served-model-name", "org/name"), ["org/name"]),
        (("--served-model-name=a/b", "--served-model-name=c/d"), ["a/b", "c/d"]),
        (("--served-model-name", "a", "--served-model-name", "c/d"), ["a", "c/d"]),
        (("loong-tiny", "--served-model-name", "a", "c/d"), ["a", "c/d"]),
        (("--served-model-name", "a", "c/d", "--model", "loong-tiny"), ["a", "c/d"]),
    ],
)
def test_a_served_name_may_be_that_of_an_organization(words: tuple[str, ...], names: list[str]) -> None:
    args = build_parser(["serve"])[0].parse_args(["serve", *words])
    check_names(args)
    assert args.served_model_name == names


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_the_commands_are_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    shown = capsys.readouterr().out
    assert set(COMMANDS) <= {line.split()[0] for line in shown.splitlines() if line.startswith("    ")}


def test_help_is_of_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", "chat"])
    assert "Talk to a served model." in capsys.readouterr().out


def test_a_model_is_named_by_a_flag_too() -> None:
    parser, _ = build_parser(["serve"])
    for words in (["m"], ["--model", "m"], ["--port", "1", "--model", "m"], ["--model=m", "--port", "1"]):
        assert parser.parse_args(["serve", *words]).model == "m"
    assert parser.parse_args(["serve"]).model is None


INTERRUPTED_IMPORT = """
import os, signal, sys
interrupted, num_imports = sys.argv.pop(1), 0
class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
def interrupt(event, arguments):
    global num_imports
    if event == "import":
        num_imports += 1
        if interrupted in (str(num_imports), arguments[0]):
            type("Owner", (), {"descriptor": Descriptor()})
from loong.launcher.entry import main
sys.addaudithook(interrupt)
raise SystemExit(main())
"""


def interrupted_at(imported: str, *words: str) -> tuple[int, str]:
    """Return the exit code and errors of a command that is interrupted at an import, by its number or name.

    The interrupt comes while a class is made.
    """
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, imported, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("number", [1, 5, 20, 60, 150, 300])
def test_an_interrupt_is_one_line_in_imports_too(number: int) -> None:
    ended = interrupted_at(str(number), "workload", "describe", "mixed")
    assert ended == (130, "loong: interrupted\n")


def test_an_interrupt_of_what_a_server_imports_late_is_one_line() -> None:
    code, errors = interrupted_at("loong.server.app", "serve", "--port", str(free_port()))
    *_, last = errors.splitlines()
    assert (code, last) == (130, "loong: interrupted")
    assert "Traceback" not in errors


def test_the_environment_is_reported_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "torch" in found["packages"]
    assert "hunter2" not in shown
