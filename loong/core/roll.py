"""The views of all live requests, each made anew only when its request has changed."""

from loong.core.records import LiveRequest
from loong.core.request import RequestId, RequestView


class Roll:
    """Views by request: `waiting` in order of arrival, `running` as they began; `views` has both.

    They are right after `refresh`, if every request was given to `note` when it came and when it changed.
    Forks have none before they begin: until then their leader counts them; nor have those that are leaving.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestId, RequestView] = {}
        self.running: dict[RequestId, RequestView] = {}
        self.views: dict[RequestId, RequestView] = {}
        self._noted: list[LiveRequest] = []
        self._numbers: dict[RequestId, int] = {}
        self._newest = 0  # of these

    def note(self, live: LiveRequest) -> None:
        """Take in that a request is new, or changes."""
        if not (live.is_noted or live.is_leaving) and live.leader is None:
            live.is_noted = True
            self._noted.append(live)

    def drop(self, live: LiveRequest) -> None:
        """Forget a request."""
        live.is_noted = False
        for by_id in (self.waiting, self.running, self.views, self._numbers):
            by_id.pop(live.request.request_id, None)

    def refresh(self) -> None:
        """Make the views of all that were noted."""
        is_in_order = True
        for live in self._noted:
            if live.is_noted:
                live.is_noted = False
                is_in_order &= self._enter(live)
        self._noted.clear()
        if not is_in_order:
            self.waiting = dict(sorted(self.waiting.items(), key=lambda item: self._numbers[item[0]]))

    def _enter(self, live: LiveRequest) -> bool:
        """Whether those that wait are still in order: one that ran, or was a fork, may be older."""
        view = live.view()
        request_id = view.request_id
        self.views[request_id] = view
        if view.has_begun:
            if request_id not in self.running:
                self.waiting.pop(request_id, None)
                self._see(live)
            self.running[request_id] = view
            return True
        self.running.pop(request_id, None)
        is_in_order = request_id in self.waiting or live.number >= self._newest
        self.waiting[request_id] = view
        self._see(live)
        return is_in_order

    def _see(self, live: LiveRequest) -> None:
        self._numbers[live.request.request_id] = live.number
        self._newest = max(self._newest, live.number)
