"""The views of all live requests, each made anew only when its request has changed."""

from loong.core.records import LiveRequest
from loong.core.request import RequestId, RequestView


class Roll:
    """Views by request: `waiting` in order of arrival, `running` as they began; `views` has both.

    They are right after `refresh`, if every request was given to `note` when it came and when it changed.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestId, RequestView] = {}
        self.running: dict[RequestId, RequestView] = {}
        self.views: dict[RequestId, RequestView] = {}
        self._changed: dict[RequestId, LiveRequest] = {}

    def note(self, request_id: RequestId, live: LiveRequest) -> None:
        """Take in that a request is new or changes."""
        self._changed[request_id] = live

    def drop(self, request_id: RequestId) -> None:
        """Forget a request."""
        for entries in (self.waiting, self.running, self.views, self._changed):
            entries.pop(request_id, None)

    def refresh(self) -> None:
        """Make the views of all that was noted."""
        has_returned = False
        for request_id, live in self._changed.items():
            view = self.views[request_id] = live.view()
            if view.has_begun:
                self.waiting.pop(request_id, None)
                self.running[request_id] = view
            else:
                has_returned |= self.running.pop(request_id, None) is not None
                self.waiting[request_id] = view
        self._changed.clear()
        if has_returned:  # views are in order of arrival: each stays where it came
            self.waiting = {r: view for r, view in self.views.items() if r in self.waiting}
