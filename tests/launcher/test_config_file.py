"""Flags in a file, by the parsers of the commands themselves."""

from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cli import build_parser
from loong.launcher.config_file import apply_config_file


def parsed(tmp_path: Path, text: str, *typed: str, command: str = "serve") -> dict[str, object]:
    """Return the flags of a command, from a file and from the words typed after it."""
    path = tmp_path / f"{command}.yaml"
    path.write_text(text)
    words = [command, "--config", str(path), *typed]
    parser, commands = build_parser([command])
    apply_config_file(commands[command], words)
    return vars(parser.parse_args(words))


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    reported = parsed(tmp_path, "port: 9001\nnum_instances: 2\nmodel: ./m\n", "--port", "9002")
    assert (reported["port"], reported["num_instances"], reported["model"], reported["host"]) == (
        9002,
        2,
        "./m",
        "127.0.0.1",
    )
    assert parsed(tmp_path, "model: ./m\n", "./other")["model"] == "./other"


def test_values_are_those_of_the_command_line(tmp_path: Path) -> None:
    reported = parsed(tmp_path, "max-model-len: 25.6k\nrecalibrate: false\nevent-log-prompts: true\n")
    assert (reported["max_model_len"], reported["recalibrate"], reported["event_log_prompts"]) == (
        25600,
        False,
        True,
    )
    assert parsed(tmp_path, "event-log-prompts: false\n")["event_log_prompts"] is False


def test_a_flag_that_may_be_repeated_takes_a_list_or_what_is_typed_instead(tmp_path: Path) -> None:
    keys = "api-key: [one, two]\n"
    assert parsed(tmp_path, keys)["api_key"] == ["one", "two"]
    assert parsed(tmp_path, keys, "--api-key", "three")["api_key"] == ["three"]


def test_a_flag_of_several_values_takes_a_list(tmp_path: Path) -> None:
    bounds = "goodput: ['ttft:2000', 'tpot:50']\n"
    assert parsed(tmp_path, bounds, command="bench")["goodput"] == ["ttft:2000", "tpot:50"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 5\n", "no flag 'prot'; did you mean port?"),
        ("port: 99999\n", "port: '99999' is no port from 0 to 65535"),
        ("policy: esq\n", "did you mean esp?"),
        ("port:\n", "port has no value"),
        ("- port\n", "no YAML of flags and values"),
        ("port: [1\n", "no YAML of flags and values"),
        ("help: true\n", "no flag 'help'"),
        ("config: other.yaml\n", "no flag 'config'"),
    ],
)
def test_what_cannot_be_is_reported_in_one_line_that_names_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed(tmp_path, text)
    (line,) = str(refusal.value).splitlines()
    assert "serve.yaml" in line
    assert said in line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    _, commands = build_parser(["serve"])
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        apply_config_file(commands["serve"], [f"--config={tmp_path / 'none.yaml'}"])
