"""The decision log to explain, and what the document of its run says about it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loong.core.errors import ConfigError
from loong.runs.run_document import FILE_NAME
from loong.runs.run_folder import LOG_SUFFIX, logs_beside, newest_decision_log
from loong.workloads.report.run_document import RunRow, read_document


@dataclass(frozen=True, slots=True)
class ChosenLog:
    """A decision log. Without a document of its run, it has no `policy`, and no `measured_ids`.

    `others` are the names of other logs in the folder, or their flags.
    """

    path: Path
    policy: str | None = None
    measured_ids: frozenset[str] = frozenset()
    others: Sequence[str] = ()


def chosen_log(named: Path | None, policy: str | None) -> ChosenLog:
    """Return the named log, or that of a run's folder or (None) of the newest run here.

    Of a run that is the log of `policy`, or of its first policy, which others are compared with. Raises
    `ConfigError` if there is none.
    """
    if named is not None and not named.is_dir():
        if policy is not None:
            raise ConfigError(f"--policy chooses a log of a run's folder, but {named} is a log itself")
        return _described(named)
    newest = newest_decision_log(named)
    logs = _logs_of(_rows(newest.parent))
    if policy is not None:
        path = newest.with_name(logs.get(policy) or f"decisions-{policy}{LOG_SUFFIX}")
        if not path.exists():
            there = ", ".join(logs) or ", ".join((newest.name, *logs_beside(newest)))
            raise ConfigError(f"{newest.parent} has no decision log of --policy {policy}; it has {there}")
        return _described(path)
    first = (newest.with_name(name) for name in logs.values())
    return _described(next((path for path in first if path.exists()), newest))


def _described(path: Path) -> ChosenLog:
    rows = _rows(path.parent)
    flags = {name: f"--policy {policy}" for policy, name in _logs_of(rows).items()}
    own = [row for row in rows if row.decision_log == path.name]
    return ChosenLog(
        path,
        own[0].policy if own else None,
        frozenset(request_id for row in own for request_id in row.request_ids if request_id),
        [flags.get(name, name) for name in logs_beside(path)],
    )


def _logs_of(rows: Sequence[RunRow]) -> Mapping[str, str]:
    """Return the name of each policy's log, in the order of the runs."""
    return {row.policy: row.decision_log for row in rows if row.decision_log is not None}


def _rows(folder: Path) -> Sequence[RunRow]:
    """Return the runs of a folder's document; none if there is no document that can be read."""
    with suppress(ConfigError):
        return read_document(folder / FILE_NAME).runs
    return ()
