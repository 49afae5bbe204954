"""The claims of docs/coming-from-vllm.md hold."""

import re
from collections.abc import Iterator
from pathlib import Path

from loong.launcher.cli import build_parser
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
        for flag in FLAG.findall(theirs) if ours != "the same" else ():
            place = SERVE[flag].partition(":")[0]
            assert place == ours.strip("`"), flag
    assert not SERVE.keys() & set(build_parser(["serve"])[1]["serve"].flags)
    assert not BENCH.keys() & set(build_parser(["bench"])[1]["bench"].flags)


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
