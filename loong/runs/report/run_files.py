"""Reads the arguments of `loong plot`: folders and documents of runs, traces, and decision logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loong.core.cluster_history import ClusterHistory
from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.runs.report.logged_history import history_of_log
from loong.runs.report.rejudged import rejudged
from loong.runs.run_document import FILE_NAME
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.run_document import RunDocument, RunRow, as_simulated, read_document
from loong.workloads.report.timeline import parse_trace

LOG_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Documents, each with the folder of its traces; and histories by title that belong to no document.

    `decisions` are by the titles of those histories that are from decision logs, which have no trace yet.
    """

    documents: Sequence[tuple[Path, RunDocument]] = ()
    histories: Mapping[str, ClusterHistory] = field(default_factory=dict)
    decisions: Mapping[str, LogIndex] = field(default_factory=dict)

    def judged_under(self, rules: Sequence[SLORule]) -> "RunFiles":
        """Return the files with all runs judged under these rules as well.

        Raises `ConfigError` if they cannot be judged.
        """
        folders = [folder for folder, _ in self.documents]
        documents = rejudged([document for _, document in self.documents], rules)
        return replace(self, documents=list(zip(folders, documents, strict=True)))

    def history_of(self, run: RunRow) -> ClusterHistory | None:
        """Return the history of a run; None if it has no trace, or the file is gone."""
        for folder, document in self.documents:
            if run.trace is not None and run in document.runs and (folder / run.trace.file).is_file():
                history = _trace(folder / run.trace.file)
                return history if run.trace.after is None else history.after(run.trace.after)
        return None

    def decisions_of(self, run: RunRow) -> LogIndex | None:
        """Return the decisions of a run; None if it has no decision log, or the file is gone or empty.

        Raises:
            ConfigError: the file is no decision log.
        """
        for folder, document in self.documents:
            if run.decision_log is not None and run in document.runs:
                path = folder / run.decision_log
                return indexed(read_log(path)) if path.is_file() and path.stat().st_size else None
        return None


def read_run_files(paths: Sequence[Path]) -> RunFiles:
    """Read each path: a run's folder, a document, a trace or a decision log.

    Raises:
        ConfigError: one cannot be read, or is none of these.
    """
    documents: list[tuple[Path, RunDocument]] = []
    histories: dict[str, ClusterHistory] = {}
    decisions: dict[str, LogIndex] = {}
    for path in paths:
        document = path / FILE_NAME if path.is_dir() else path
        if path.is_dir() and not document.exists():
            raise ConfigError(
                f"{path} has no {FILE_NAME}; name an --output-dir of `loong bench` or `simulate`"
            )
        if path.suffix == LOG_SUFFIX:
            histories[path.stem] = history_of_log(path)
            decisions[path.stem] = indexed(read_log(path))
        elif _is_trace(document):
            histories[document.stem.removeprefix("trace-")] = _trace(document)
        else:
            documents.append((document.parent, read_document(document)))
    if len({document.kind for _, document in documents}) > 1:
        documents = [(folder, as_simulated(document)) for folder, document in documents]
    return RunFiles(documents, histories, decisions)


def _is_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'"traceEvents"' in file.read(4096)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _trace(path: Path) -> ClusterHistory:
    try:
        return parse_trace(path.read_bytes())
    except NOT_JSON as error:
        raise ConfigError(f"{path} is no trace of loong: {error}") from error
