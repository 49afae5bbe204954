"""The claims of docs/coming-from-vllm.md hold."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher import sglang_flags
from loong.launcher.cli import build_parser
from loong.launcher.config_file import apply_config_file
from loong.launcher.other_servers import WHAT_IT_DOES
from loong.launcher.vllm_flags import BENCH, SERVE
from loong.server.api.parsing import HARMLESS
from loong.server.openai.schemas import ChatFields, CompletionFields
from loong.server.reference.openapi import OPERATIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from-vllm.md").read_text()
FLAG = re.compile(r"`(--?[a-z][a-z-]*)")
NAME = re.compile(r"`([a-z_]+)`")
SERIES = re.compile(r"`((?:vllm|loong):\w+)`")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> Iterator[list[str]]:
    """Yield the cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_flags_that_are_said_to_be_here_are_and_the_others_are_not() -> None:
    flags = set(build_parser(["serve"])[1]["serve"].flags)
    for theirs, ours, _ in rows("Flags"):
        found = set(FLAG.findall(theirs))
        if ours == "the same":
            assert found <= flags
        else:
            assert not found & flags
            assert set(FLAG.findall(ours)) <= flags
    own = section("Flags").split("loong's own: ")[1]
    assert set(FLAG.findall(own)) <= flags


def test_every_flag_that_is_not_here_is_refused_with_its_place() -> None:
    for theirs, ours, _ in rows("Flags"):
        if ours == "taken":
            assert set(FLAG.findall(theirs)) <= WHAT_IT_DOES
        for flag in FLAG.findall(theirs) if ours not in ("the same", "taken") else ():
            place = SERVE[flag].partition(":")[0]
            assert place == ours.strip("`"), flag
    for command, hints in (("serve", (SERVE, sglang_flags.SERVE)), ("bench", (BENCH, sglang_flags.BENCH))):
        flags = set(build_parser([command])[1][command].flags)
        for known in hints:
            assert not known.keys() & (flags | WHAT_IT_DOES)
            places = {words.partition(":")[0] for words in known.values()}
            assert {place.split()[0] for place in places} <= flags | {"none"}


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            ["--mem-fraction-static", "0.8"],
            "which SGLang has; write --gpu-memory-utilization: of a GPU's free",
        ),
        (["--tp-size=2"], "there is no flag --tp-size, which SGLang has; write --tensor-parallel-size"),
        (["--disable-cuda-graph"], "which SGLang has, and nothing stands in its place: steps are captured"),
        (["--enable_lora"], "which vLLM has, and nothing stands in its place: there are no LoRA adapters"),
        (["--disable-radix-cache"], "which SGLang has; write --no-enable-prefix-caching"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_what_to_write(
    words: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser(["serve"])[0].parse_args(["serve", *words])
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize("flag", [*sorted(WHAT_IT_DOES), "--no_enable_log_requests"])
def test_a_flag_that_asks_for_what_is_so_in_any_case_is_taken_silently(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = build_parser(["serve"])[0].parse_args(["serve", "tiny", flag, "--port", "1"])
    assert (args.model, args.port) == ("tiny", 1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("line", ["enable-log-requests: false", "enable_chunked_prefill: true"])
def test_so_it_is_in_a_file_of_flags(line: str, tmp_path: Path) -> None:
    parser = build_parser(["serve"])[1]["serve"]
    path = tmp_path / "serve.yaml"
    path.write_text(f"{line}\nport: 7\n")
    apply_config_file(parser, ["--config", str(path)])
    assert parser.parse_args([]).port == 7
    path.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError, match="which vLLM has, and nothing stands in its place"):
        apply_config_file(parser, ["--config", str(path)])


def test_fields_that_are_said_to_be_taken_are_and_the_others_are_refused() -> None:
    fields = CompletionFields.model_fields.keys() | ChatFields.model_fields.keys()
    for names, what in rows("API fields"):
        found = set(NAME.findall(names))
        assert found
        if what.startswith("refused"):
            assert not found & (fields | HARMLESS)
        elif what.startswith("taken, and of no effect"):
            assert found <= HARMLESS
        else:
            assert found <= fields
    reported = {name for names, _ in rows("API fields") for name in NAME.findall(names)}
    assert fields <= reported | {"model"}


def test_endpoints_that_are_said_to_be_here_are() -> None:
    here, others = section("API fields").split("Endpoints: ")[1].split("Others (")
    paths = {operation.path for operation in OPERATIONS} | {"/dashboard"}
    assert set(re.findall(r"`(/[\w/]+)`", here)) <= paths
    assert not set(re.findall(r"`(/[\w/]+)`", others.split(")")[0])) & paths


def test_series_that_are_said_to_be_here_are_described_and_the_others_are_not() -> None:
    described = set(re.findall(r"`((?:vllm|loong):\w+)", (DOCS / "observability.md").read_text()))
    for theirs, ours in rows("Metrics"):
        if ours == "the same":
            assert set(SERIES.findall(theirs)) == {name for name in described if name.startswith("vllm:")}
        else:
            assert not set(SERIES.findall(theirs)) & described
            assert set(SERIES.findall(ours)) <= described
