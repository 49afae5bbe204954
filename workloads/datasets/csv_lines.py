"""Files of comma-separated values under a line of column names."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loong.core.errors import ConfigError
from loong.workloads.datasets.recording import bad


@dataclass(frozen=True, slots=True)
class CSVLine:
    """A line by the names of its columns; `number` counts from 1, the column names' line included."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell as it stands."""
        return self.cells[column]

    def tokens(self, column: str) -> int:
        """Return a cell that is a whole number of tokens."""
        text = self.cells[column]
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 2**53 or value != int(value):
            raise self.error(f"{column} {text!r} is no number of tokens")
        return int(value)

    def error(self, problem: str) -> ConfigError:
        """Return an error that names this line."""
        return bad(self.path, f"line {self.number}", problem)


def csv_lines(path: Path, columns: Sequence[str]) -> Iterator[CSVLine]:
    """Yield the lines of a file that has at least these columns.

    Raises:
        ConfigError: a line with fewer cells than the first, or text that cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                line = CSVLine(path, reader.line_num, cells)
                for column in columns:
                    if not cells.get(column):
                        raise line.error(f"there is no {column}")
                yield line
        except (csv.Error, UnicodeDecodeError) as error:
            raise bad(path, f"line {reader.line_num + 1}", str(error)) from error
