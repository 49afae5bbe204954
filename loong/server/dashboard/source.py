"""What the dashboard shows that an engine alone does not tell."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from loong.core.request import SLO
from loong.decision_log.recent import RecentLines
from loong.decision_log.runs import RequestRun, RequestRuns

MAX_OVER = 500


@dataclass(frozen=True, slots=True)
class DashboardSource:
    """`errors` are the cost model's by phase; `target` is what a prompt of so many tokens is promised.

    `over` are the last requests that are over, oldest first.
    """

    policy: str
    recent: RecentLines
    runs: RequestRuns
    errors: Callable[[], Mapping[str, float]]
    target: Callable[[int], SLO]
    over: deque[RequestRun] = field(default_factory=lambda: deque(maxlen=MAX_OVER))

    def __post_init__(self) -> None:
        self.runs.tell(self.over.append)


SOURCE = web.AppKey("dashboard", DashboardSource)
