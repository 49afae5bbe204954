"""The flags of `loong chaos`, and servers that it cannot use."""

import argparse

import pytest

from loong.launcher.chaos.config import duration, interval
from loong.launcher.chaos.prompts import SHORTEST_OUTPUT, SHORTEST_PROMPT, drawn_prompts
from loong.launcher.cli import main


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("500ms", 0.5)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "seconds"), [("1/30s", 30), ("2/1m", 30), ("4/2", 0.5)])
def test_rates_of_faults_are_numbers_in_a_time(text: str, seconds: float) -> None:
    assert interval(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["30s", "0/30s", "-1/30s", "1/", "1/0s", "1/inf", "x/30s", "1/30 parsecs"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as"):
        interval(text)


def test_a_run_without_faults_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos"]) == 1
    assert "--kill 1/30s" in capsys.readouterr().err


def test_prompts_are_those_of_their_seed_and_keep_their_bounds() -> None:
    prompts = drawn_prompts(50, 300, 40, 256, seed=3)
    assert prompts == drawn_prompts(50, 300, 40, 256, seed=3) != drawn_prompts(50, 300, 40, 256, seed=4)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert SHORTEST_PROMPT <= min(lengths) < 30 < 100 < max(lengths) <= 300, "they are mixed"
    assert all(SHORTEST_OUTPUT <= prompt.num_output_tokens <= 40 for prompt in prompts)
    assert all(0 <= token < 256 for prompt in prompts for token in prompt.token_ids)
    assert all(len(prompt.token_ids) <= 2 for prompt in drawn_prompts(9, 2, 1, 256, seed=0))
