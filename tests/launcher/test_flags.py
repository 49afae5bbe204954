"""Values and commands as users type them."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from loong.launcher.cli import build_parser, main
from loong.launcher.flags import (
    or_auto,
    part,
    positive,
    prefix_caching_words,
    ratio,
    seconds,
    share,
    token_count,
    wait_seconds,
)
from loong.launcher.serve.command import serve_config
from loong.runs.spawned_server import ENTRY


@pytest.mark.parametrize(
    ("text", "count"), [("25600", 25600), ("25.6k", 25600), ("25K", 25600), ("1m", 10**6), ("1M", 2**20)]
)
def test_a_number_of_tokens_may_have_a_suffix(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "0", "0k", "1.5", "-1", "3z", "nan", "inf", "1e400"])
def test_what_is_no_number_of_tokens_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"25\.6k"):
        token_count(text)


def test_auto_stands_for_no_choice() -> None:
    assert or_auto(token_count)("auto") is None
    assert or_auto(token_count)("7") == 7


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "", "x"])
def test_a_count_is_a_whole_number_from_1(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        positive(text)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("1/64", 1 / 64), ("3e2", 300.0), ("2.5/5", 0.5)])
def test_a_ratio_is_a_number_or_a_fraction(text: str, value: float) -> None:
    assert ratio(text) == value


@pytest.mark.parametrize(
    "text", ["0", "-1", "", "/", "1/", "1/0", "1/2/3", "x", "nan", "inf", "1e400", "1e-400"]
)
def test_what_is_no_ratio_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r} is no number above 0"):
        ratio(text)


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1s", "nan", "inf"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    assert seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r} is no number of seconds above 0"):
        seconds(text)


def test_a_wait_may_be_of_no_time() -> None:
    assert [wait_seconds(text) for text in ("0", "0.5")] == [0.0, 0.5]
    for text in ("-1", "", "x", "nan", "inf"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"^{text!r} is no number of seconds of 0 or more"
        ):
            wait_seconds(text)


def test_a_share_is_a_ratio_of_at_most_1() -> None:
    assert (share("1/4"), share("1")) == (0.25, 1.0)
    with pytest.raises(argparse.ArgumentTypeError, match=r"'5/4' is above 1"):
        share("5/4")


@pytest.mark.parametrize("text", ["-0.1", "1.1", "", "x", "nan"])
def test_a_part_is_from_0_to_1(text: str) -> None:
    assert (part("0"), part("0.25"), part("1")) == (0.0, 0.25, 1.0)
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r} is no number from 0 to 1"):
        part(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--num-instances", "0"], "--num-instances"),
        (["serve", "no-such-folder"], "'no-such-folder'"),
    ],
)
def test_a_wrong_flag_ends_the_command_with_one_clear_line(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ENTRY, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert result.returncode != 0
    line = result.stderr.splitlines()[-1]
    assert said in line
    assert "error" in line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max_model_len", "3z"], "--max-model-len"),
        (["--policy", "fastest"], "'fastest'"),
        (["--port", "99999"], "argument --port: '99999' is no port from 0 to 65535"),
        (["--lease-steps", "0"], "--lease-steps"),
        (["--drain-timeout", "-5"], "--drain-timeout"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_value_that_a_flag_cannot_have_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *arguments])
    line = capsys.readouterr().err.splitlines()[-1]
    assert said in line
    assert "error" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "tp", "--num-instances", "2"], "policy tp runs 1 instance"),
        (["--kv-cache-tokens", "500M"], "--kv-cache-tokens"),
        (["--max-model-len", "2m"], "2000000"),
        (["--event-log", "events.jsonl"], "--event-log needs --event-log-prompts"),
    ],
)
def test_flags_that_do_not_fit_each_other_or_the_machine_are_one_clear_line_too(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "error" in line


@pytest.mark.parametrize(
    ("words", "keeps"),
    [([], True), (["--enable-prefix-caching"], True), (["--no-enable-prefix-caching"], False)],
)
def test_the_prefix_cache_is_on_unless_it_is_switched_off(words: list[str], *, keeps: bool) -> None:
    for command in ("serve", "simulate"):
        args = build_parser([command])[0].parse_args([command, *words])
        assert args.enable_prefix_caching is keeps
    assert serve_config(build_parser(["serve"])[0].parse_args(["serve", *words])).keeps_prefixes is keeps


@pytest.mark.parametrize(
    "words", [[], ["--enable-prefix-caching"], ["--no-enable-prefix-caching", "--no-relay"]]
)
@pytest.mark.parametrize("command", [["bench"], ["chat", "--serve", "tiny"]])
def test_a_server_that_is_started_has_the_flag_that_was_given(command: list[str], words: list[str]) -> None:
    args = build_parser(command[:1])[0].parse_args([*command, *words])
    assert prefix_caching_words(args) == tuple(words)


def test_a_chat_without_a_server_of_its_own_has_no_prefix_cache_to_switch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--no-enable-prefix-caching"]) == 1
    assert "--no-enable-prefix-caching is of a server that --serve starts" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "bench" in shown
