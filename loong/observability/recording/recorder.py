"""An observer of the loop that records all events and plans."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loong.core.applied import Applied
from loong.core.errors import ConfigError
from loong.core.events import Event
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.line_file import LineFile
from loong.observability.recording.lines import Line, Setting, encoded, planned_line


def check_new(path: Path) -> None:
    """Raise `ConfigError` if the file exists."""
    if path.exists():
        raise ConfigError(f"the event log {path} exists; name a new file, so that no recording is lost")


@contextmanager
def recording(path: Path, setting: Setting, *, keeps_prompts: bool = False) -> Iterator["Recorder"]:
    """Yield a recorder of one run in a new file.

    Raises `ConfigError` if the file exists, or cannot be created.
    """
    check_new(path)
    file = LineFile(path, is_new=True)
    try:
        yield Recorder(file, setting, keeps_prompts=keeps_prompts)
    finally:
        file.close()


class Recorder:
    """Writes the setting, each plan, and each event before the plans made on it."""

    def __init__(self, file: LineFile, setting: Setting, *, keeps_prompts: bool) -> None:
        self._file, self._keeps_prompts = file, keeps_prompts
        self._write(setting)

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        """Write an event."""
        self._write(event)

    def on_plan(
        self,
        _events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Write a plan."""
        self._write(planned_line(plan))
        if not (snapshot.batches or snapshot.ending or instructions):
            self._file.flush()  # the next line may come much later

    def _write(self, line: Line) -> None:
        self._file.append(encoded(line, keeps_prompts=self._keeps_prompts))
