"""Refused plans in files of their own, which `loong simulate --replay` reads."""

import os
from pathlib import Path

from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.recording.lines import Refused, Setting, encoded

MAX_FILES = 4  # of one server; later refusals are logged only


class RefusedPlans:
    """Writes each refused plan, with its snapshot, as a recording without events."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._num_files = 0

    def record(self, snapshot: Snapshot, plan: IterationPlan, error: Exception) -> str:
        """Write one, and return a clause that says where it is, or why it is nowhere."""
        if self._num_files == MAX_FILES:
            return f"{MAX_FILES} such plans were kept before, and this one is not"
        path = self._folder / f"loong-refused-plan-{os.getpid()}-{self._num_files + 1}.jsonl"
        line = Refused(f"{type(error).__name__}: {error}", snapshot, plan)
        try:
            path.write_bytes(b"".join(encoded(part) + b"\n" for part in (self._setting, line)))
        except OSError as failure:
            return f"it could not be kept: {failure}"
        self._num_files += 1
        return f"`loong simulate --replay {path}` plans it again"
