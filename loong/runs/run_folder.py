"""Folders of runs: a new one for each run, and the newest one found again."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from loong.core.errors import ConfigError
from loong.runs.outputs import make_folder, sole_writer
from loong.runs.run_document import FILE_NAME

FLAG = "--output-dir"
RUNS = Path("loong-runs")
LOG_SUFFIX = ".jsonl"
_PLACES = (".", "*", f"{RUNS}/*")  # where runs and logs are looked for
_LOG_START = b'{"line":"started"'  # of every decision log


@contextmanager
def run_folder(kind: str, asked: Path | None) -> Iterator[Path]:
    """Make the folder of a run, and hold it: `asked`, or (None) the next `loong-runs/KIND-N`.

    If `asked` has the results of a run, the next free name `ASKED-N` is taken instead, and stderr says so.
    Raises `ConfigError` if the folder cannot be made, takes no files, or is of a run that goes on.
    """
    folder = _made(kind, asked)
    with sole_writer(FLAG, folder):
        yield folder


def _made(kind: str, asked: Path | None) -> Path:
    if asked is None:
        return _next_free(FLAG, (RUNS / f"{kind}-{number}" for number in count(1)))
    if not (asked / FILE_NAME).exists():
        make_folder(FLAG, asked)
        return asked
    folder = _next_free(FLAG, (asked.with_name(f"{asked.name}-{number}") for number in count(2)))
    print(f"{asked} has the results of another run; this run goes into {folder}", file=sys.stderr)
    return folder


def newest_run() -> Path:
    """Return the folder of the newest run in and below this folder. Raises `ConfigError` if there is none."""
    found = [path for place in _PLACES for path in Path().glob(f"{place}/{FILE_NAME}")]
    if not found:
        raise ConfigError("there is no run in this folder; `loong bench` or `loong simulate` makes one")
    return _newest(found).parent


def newest_decision_log(folder: Path | None = None) -> Path:
    """Return the newest decision log in a folder, or (None) in and below this one.

    Raises `ConfigError` if there is none.
    """
    base, places = (Path(), _PLACES) if folder is None else (folder, (".",))
    found = [path for place in places for path in base.glob(f"{place}/*{LOG_SUFFIX}") if _is_log(path)]
    if not found:
        raise ConfigError(
            f"there is no decision log in {folder or 'this folder'}; `loong bench` makes one for each "
            "policy, and so does `loong serve --decision-log decisions.jsonl`"
        )
    return _newest(found)


def logs_beside(log: Path) -> list[str]:
    """Return the names of the other decision logs in the folder of one, sorted."""
    paths = log.parent.glob(f"*{LOG_SUFFIX}")
    return sorted(path.name for path in paths if path != log and _is_log(path))


def _next_free(flag: str, names: Iterator[Path]) -> Path:
    for folder in names:
        if not folder.exists():
            make_folder(flag, folder.parent)
            with suppress(FileExistsError):  # another run has just made it
                folder.mkdir()
                make_folder(flag, folder)
                return folder
    raise AssertionError("the names have no end")


def _newest(paths: Iterable[Path]) -> Path:
    return max(paths, key=lambda path: path.stat().st_mtime_ns)


def _is_log(path: Path) -> bool:
    if not path.is_file():  # a pipe would wait for its writer
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_LOG_START)) == _LOG_START
    except OSError:  # another user's: no log that could be read
        return False
