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
        self._noted: list[LiveRequest] = []

    def note(self, live: LiveRequest) -> None:
        """Take in that a request is new, or changes."""
        if not live.is_noted:
            live.is_noted = True
            self._noted.append(live)

    def drop(self, live: LiveRequest) -> None:
        """Forget a request."""
        live.is_noted = False
        for views in (self.waiting, self.running, self.views):
            views.pop(live.request.request_id, None)

    def refresh(self) -> None:
        """Make the views of all that were noted."""
        has_returned = False
        for live in self._noted:
            if live.is_noted:
                live.is_noted = False
                has_returned |= self._enter(live.view())
        self._noted.clear()
        if has_returned:  # `views` are in order of arrival, for a view that is replaced stays in its place
            self.waiting = {r: view for r, view in self.views.items() if r in self.waiting}

    def _enter(self, view: RequestView) -> bool:
        """Whether a request that ran waits again."""
        request_id = view.request_id
        self.views[request_id] = view
        if request_id in self.running and view.has_begun:  # as most are
            self.running[request_id] = view
            return False
        if view.has_begun:
            self.waiting.pop(request_id, None)
            self.running[request_id] = view
            return False
        self.waiting[request_id] = view
        return self.running.pop(request_id, None) is not None
