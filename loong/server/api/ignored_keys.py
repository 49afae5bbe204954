"""Unknown keys of messages: they are ignored, and each is logged once."""

import logging
from collections.abc import Iterable
from threading import Lock

from loong.server.api.parsing import short

logger = logging.getLogger(__name__)

MAX_KEYS = 64  # clients choose them


class IgnoredKeys:
    """The unknown keys that one server has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = Lock()

    def note(self, keys: Iterable[str]) -> None:
        """Log each new key, up to `MAX_KEYS` of them. Any thread may call it."""
        with self._lock:
            for key in map(short, keys):
                if len(self._logged) == MAX_KEYS:
                    return
                if key not in self._logged:
                    self._logged.add(key)
                    is_last = "; further keys are not logged" if len(self._logged) == MAX_KEYS else ""
                    logger.warning("messages with the key %r: it is ignored%s", key, is_last)
