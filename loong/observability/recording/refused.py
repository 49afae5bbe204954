"""Refused plans in their own files, for `loong simulate --replay`."""

from pathlib import Path
from tempfile import NamedTemporaryFile

from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.observability.recording.lines import RefusedPlanRecord, Setting, encoded

MAX_FILES = 4  # of one server; later refusals are logged only


class RefusedPlans:
    """Writes each refused plan, with its snapshot, as a recording without events."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._num_files = 0

    def record(self, snapshot: Snapshot, plan: IterationPlan, error: Exception) -> str:
        """Write a plan, and return a clause with its file, or with the reason why there is none."""
        if self._num_files == MAX_FILES:
            return f"{MAX_FILES} such plans were kept before, and this one is not"
        line = RefusedPlanRecord(f"{type(error).__name__}: {error}", snapshot, plan)
        try:
            text = b"".join(encoded(part) + b"\n" for part in (self._setting, line))
            with NamedTemporaryFile(
                prefix="loong-refused-plan-", suffix=".jsonl", dir=self._folder, delete=False
            ) as file:
                file.write(text)
        except (
            OSError,
            TypeError,
            ValueError,
        ) as failure:  # from the disk, or from values that cannot be encoded
            return f"it could not be kept: {failure}"
        self._num_files += 1
        return f"`loong simulate --replay {file.name}` plans it again"
