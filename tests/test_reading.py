"""The path through the code in docs/reading.md: short enough for an evening, and there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 2000
FILE = re.compile(r"^\|\[([^\]]+\.py)\]\(\.\./\1\)\|[A-Z`][^|]*\.\|$", re.MULTILINE)


def test_the_path_through_the_code_is_of_files_that_are_there_and_no_longer_than_it_says() -> None:
    page = (ROOT / "docs" / "reading.md").read_text()
    files = FILE.findall(page)
    assert len(files) == page.count("|[") > 10
    num_lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert num_lines <= MAX_LINES
    assert f"{MAX_LINES:,}" in page
