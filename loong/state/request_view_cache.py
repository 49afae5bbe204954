"""The views of all live requests, each made anew only when its request has changed."""

from loong.core.request import RequestId, RequestView
from loong.state.live_request import LiveRequest


class RequestViewCache:
    """Views by request: `waiting` in order of arrival, `running` as they began; `views` has both.

    They are correct after `refresh`, if every request was passed to `mark_stale` when it came and when it
    changed; until then it is in `stale`. Siblings have no view before they begin; until then their primary
    counts them. Requests that are leaving have none either, and those `following` another, or about to
    begin anew, one of their own.
    """

    def __init__(self) -> None:
        self.waiting: dict[RequestId, RequestView] = {}
        self.running: dict[RequestId, RequestView] = {}
        self.views: dict[RequestId, RequestView] = {}
        self.following: dict[RequestId, RequestView] = {}
        self.stale: list[LiveRequest] = []
        self._numbers: dict[RequestId, int] = {}
        self._newest = 0  # of these

    def mark_stale(self, live: LiveRequest) -> None:
        """Record that a request is new, or changes."""
        if not (live.is_view_stale or live.is_leaving or live.is_sibling):
            live.is_view_stale = True
            self.stale.append(live)

    def drop(self, live: LiveRequest) -> None:
        """Forget a request."""
        live.is_view_stale = False
        for by_id in (self.waiting, self.running, self.views, self.following, self._numbers):
            by_id.pop(live.request.request_id, None)

    def refresh(self) -> None:
        """Make the views of all stale requests."""
        is_in_order = True
        for live in self.stale:
            if live.is_view_stale:
                live.is_view_stale = False
                is_in_order &= self._refresh_view(live)
        self.stale.clear()
        if not is_in_order:
            self.waiting = dict(sorted(self.waiting.items(), key=lambda item: self._numbers[item[0]]))

    def _refresh_view(self, live: LiveRequest) -> bool:
        """Make a view; return whether waiting requests are still in order.

        A request that ran, or was a sibling, may be older than those that wait.
        """
        view = live.view()
        request_id = view.request_id
        if live.is_following or live.is_broken:
            self.drop(live)
            self.following[request_id] = view
            return True
        self.following.pop(request_id, None)
        self.views[request_id] = view
        if view.has_begun:
            if request_id not in self.running:
                self.waiting.pop(request_id, None)
                self._record_number(live)
            self.running[request_id] = view
            return True
        self.running.pop(request_id, None)
        is_in_order = request_id in self.waiting or live.number >= self._newest
        self.waiting[request_id] = view
        self._record_number(live)
        return is_in_order

    def _record_number(self, live: LiveRequest) -> None:
        self._numbers[live.request.request_id] = live.number
        self._newest = max(self._newest, live.number)
