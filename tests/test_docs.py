"""The targets of references in pages exist, and tables of measurements name what is saved."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("[a-z]*/README.md"),
    *(ROOT / "loong" / name / "README.md" for name in ("executor", "fabric", "lending", "state")),
]
PUBLISHED = ROOT / "docs" / "workloads.md"  # its numbers are those of others' traces
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> Iterator[str]:
    """Yield the link targets of a page's headings."""
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
        yield re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for name, anchor in LINK.findall(prose(page)):
        if "://" in name:
            continue
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def has_measurements(section: str) -> bool:
    """Return whether a section has a table in which half of the cells behind the first are numbers."""
    for rows in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        cells = [cell for row in rows.splitlines()[2:] for cell in row.strip("|").split("|")[1:] if cell]
        numbers = [cell for cell in cells if sum(map(str.isalpha, cell)) < sum(map(str.isdigit, cell))]
        if len(cells) >= 4 and 2 * len(numbers) >= len(cells):
            return True
    return False


@pytest.mark.parametrize("page", sorted({*PAGES} - {PUBLISHED}), ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_measurements_name_their_saved_file_or_say_that_there_is_none(page: Path) -> None:
    begin, *sections = re.split(r"^#+ ", prose(page).partition("\n")[2], flags=re.MULTILINE)
    if "benchmarks/results/" in begin:
        return
    for section in sections:
        is_named = "benchmarks/results" in section or "not saved" in section
        assert is_named or not has_measurements(section), section.partition("\n")[0]
