"""What all commands have in common."""

import json
import os
import signal
import subprocess
import sys

import pytest

from loong.launcher.cli import main
from loong.launcher.embedded import ENTRY


def test_whoever_has_seen_enough_may_stop_reading() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    result = subprocess.run(
        [sys.executable, "-c", ENTRY, "workload", "describe", "mixed", "--num-requests", "3"],
        stdout=writing_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing_end)
    assert result.returncode == 128 + signal.SIGPIPE
    assert not result.stderr


def said_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a wrong command is answered with."""
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
        (("serve", "--num-inst", "5"), "there is no flag --num-inst;"),  # no abbreviations
        (("serve", "a", "b"), "'b' is one argument too many"),
        (("serve", "--xyzzy"), "there is no flag --xyzzy ("),
        (("bench", "--max-model-len", "1k"), "take it in --extra-server-args='--max-model-len ...'"),
        (("bench", "--reqest-rate", "1"), "did you mean --request-rate?"),
        (("workload", "describe", "--sed", "5"), "did you mean --seed?"),
    ],
)
def test_what_was_meant_is_told(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in said_of(capsys, *words)


def test_the_environment_is_told_without_secrets(
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
