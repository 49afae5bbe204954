import argparse
import json
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher import plan

DEVICES = Path(__file__).parents[3] / "docs/examples/devices.yaml"


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="loong")
    plan.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", "--model", "llama-2-7b", *arguments])
    code: int = args.run(args)
    return code


def test_mixes_are_shown_beside_the_best_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices", str(DEVICES), "--workload", "fixed(2000,2000)", "--request-rate", "50") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "fixed(2000,2000): 2,000 tokens in and 2,000 out on average; TPOT of at most 50"
    )
    assert "times the tokens of the best alone" in printed
    rows = json.loads(printed.splitlines()[-1])["offers"]
    assert len(rows) == 6
    assert rows[0]["rate_per_price"] > rows[-1]["rate_per_price"]
    assert rows[-1]["needed_bandwidth"] is None
    for row in rows:
        assert (
            row["num_units"] * row["output_rate"] >= 50 * 2000 > (row["num_units"] - 1) * row["output_rate"]
        )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "a: {price: 1, memory_gb: 80, bandwidth_gbps: 0, link_gbps: 1}",
            "bandwidth_gbps of a must be above 0",
        ),
        ("a: {price: 1, memory_gb: 80, bandwidth_gbps: 1, link_gbps: 1, watts: 3}", "unknown field `watts`"),
        ("a: {price: .nan, memory_gb: 80, bandwidth_gbps: 1, link_gbps: 1}", "price of a must be above 0"),
        ("{}", "names no device"),
        ("a: {price: 1, memory_gb: 80, bandwidth_gbps: 1, link_gbps: 1}", "no mix of a has room"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        run("--devices", str(file), "--workload", "fixed(10,10)")


def test_rules_without_a_bound_of_tpot_are_refused() -> None:
    with pytest.raises(ConfigError, match="bounds no TPOT"):
        run("--devices", str(DEVICES), "--slo", "ttft:2000")
