"""The runs that are looked at closely: of each policy the first one at the rate that is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loong.core.cluster_history import ClusterHistory
from loong.observability.decision_log.story.index import LogIndex
from loong.runs.report.late_requests import RequestStory, late_requests, stories_of
from loong.runs.report.run_files import RunFiles
from loong.workloads.plots.waterfall import LateRequest
from loong.workloads.report.run_document import RuleRuns, RunRow


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The history and decisions of a run, as far as files have them; `run` is None without a document."""

    history: ClusterHistory
    late: Sequence[LateRequest]
    run: RunRow | None
    index: LogIndex | None

    @staticmethod
    def of(history: ClusterHistory, run: RunRow | None = None, index: LogIndex | None = None) -> "WatchedRun":
        """Return the run with the requests of it that were late most."""
        return WatchedRun(history, late_requests(history, run, index), run, index)

    def stories(self, request_ids: Sequence[str]) -> list[RequestStory]:
        """Return the stories of these requests that are in the decision log."""
        return [] if self.index is None else stories_of(self.index, request_ids)

    @property
    def late_stories(self) -> list[RequestStory]:
        """Return the stories of the requests that were late most."""
        return self.stories([request.span.request_id for request in self.late])


def watched_runs(files: RunFiles, runs: RuleRuns) -> Mapping[str, WatchedRun]:
    """Return the run of each policy that is watched, if its history was kept."""
    found: dict[str, WatchedRun] = {}
    for policy in runs.policies:
        for run in runs.at(policy, runs.shown_rate)[:1]:
            if (history := files.history_of(run)) is not None:
                found[policy] = WatchedRun.of(history, run, files.decisions_of(run))
    return found


def watched_logs(files: RunFiles) -> Mapping[str, WatchedRun]:
    """Return the traces and decision logs that belong to no document, by title."""
    return {
        title: WatchedRun.of(history, index=files.decisions.get(title))
        for title, history in files.histories.items()
    }
