"""Frames on private sockets that are not messages. Any process of the same user may send them."""

import logging
from threading import Lock

logger = logging.getLogger(__name__)

_MAX_DETAIL = 200  # characters


class StrayFrames:
    """Counts the frames that were dropped on one socket. Any thread may call it."""

    def __init__(self, socket: str) -> None:
        self.num_dropped = 0
        self._socket = socket
        self._kinds: set[str] = set()
        self._lock = Lock()

    def drop(self, kind: str, detail: str) -> None:
        """Count a frame, and log the first one of its kind."""
        with self._lock:
            self.num_dropped += 1
            is_first = kind not in self._kinds
            self._kinds.add(kind)
        if is_first:
            logger.warning(
                "dropped %s on %s: %s; more of this kind are only counted, as loong:stray_frames_total",
                kind,
                self._socket,
                detail[:_MAX_DETAIL],
            )
