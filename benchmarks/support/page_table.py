"""Tables that a script writes into a page, between two lines that name both."""

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def write_table(page: Path, name: str, script: str, lines: Iterable[str]) -> bool:
    """Replace a table in a page. Return false if the page has no place for it."""
    begin, end = f"<!-- table {name} by {script} -->\n", f"<!-- end of table {name} -->\n"
    before, found_begin, rest = page.read_text().partition(begin)
    if not found_begin:
        return False
    _, _, after = rest.partition(end)
    page.write_text("\n".join([f"{before}{begin}", *lines, f"\n{end}{after}"]))
    return True
