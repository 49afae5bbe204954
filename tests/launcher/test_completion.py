"""Completions by a real bash."""

import subprocess

import pytest

from loong.launcher.cli import COMMANDS, build_parser, main
from loong.launcher.completion import script


@pytest.fixture(scope="module")
def completion() -> str:
    return script(build_parser(COMMANDS)[1])


def offered(completion: str, *words: str) -> list[str]:
    typed = " ".join(f"'{word}'" for word in ("loong", *words))
    asked = f'{completion}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _loong; echo "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert not found.stderr
    return found.stdout.split()


def test_commands_flags_and_values_are_offered(completion: str) -> None:
    assert offered(completion, "se") == ["serve"]
    assert set(offered(completion, "")) == set(COMMANDS)
    assert offered(completion, "serve", "--num-in") == ["--num-instances"]
    assert offered(completion, "serve", "--device", "") == ["cpu", "cuda"]
    assert offered(completion, "bench", "--num-in") == ["--num-instances"]
    assert "--num-instances" not in offered(completion, "explain", "--")


def test_the_command_prints_what_a_shell_takes(completion: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        printed.append(capsys.readouterr().out)
    for_bash, for_zsh = printed
    assert for_bash == completion
    assert for_zsh.endswith(for_bash)
    assert "bashcompinit" in for_zsh.removesuffix(for_bash)


def test_files_are_offered_where_files_are_meant(completion: str) -> None:
    assert "/etc/hosts" in offered(completion, "serve", "--cost-model", "/etc/host")
    assert offered(completion, "serve", "--port", "/etc/host") == []
