"""Reader of recordings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loong.core.errors import ConfigError
from loong.core.events import Event
from loong.foreign_json import NOT_JSON
from loong.observability.recording.lines import (
    VERSION,
    Line,
    PlanRecord,
    RefusedPlanRecord,
    Setting,
    decoded,
)


@dataclass(slots=True)
class RecordedStep:
    """Events, and the plans made on them, mostly one. The last events of a run may have none."""

    events: list[Event]
    plans: list[PlanRecord] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """One run, or one refused plan.

    If a run was killed, the last events may lack plans, and the last line may be cut.
    """

    setting: Setting
    recorded_steps: list[RecordedStep]
    is_cut: bool = False
    refused: RefusedPlanRecord | None = None

    @property
    def num_events(self) -> int:
        """The number of all events."""
        return sum(len(recorded_step.events) for recorded_step in self.recorded_steps)


def read_recording(path: Path) -> Recording:
    """Return the run in a file. An incomplete last line is left out.

    Raises `ConfigError` if the file cannot be read, or is not a recording of this version.
    """
    text = _text(path)
    lines = _lines(path, text)
    setting = next(lines, None)
    if not isinstance(setting, Setting):
        raise ConfigError(f"{path} is not a recording: it does not begin with a setting")
    recorded_steps: list[RecordedStep] = []
    refused = None
    for line in lines:
        if isinstance(line, Setting):
            raise ConfigError(f"{path} is damaged: it holds a second setting")
        if isinstance(line, RefusedPlanRecord):
            refused = line
        elif isinstance(line, PlanRecord):
            if not recorded_steps:
                raise ConfigError(f"{path} is damaged: it holds a plan before the first event")
            recorded_steps[-1].plans.append(line)
        elif recorded_steps and not recorded_steps[-1].plans:
            recorded_steps[-1].events.append(line)
        else:
            recorded_steps.append(RecordedStep([line]))
    return Recording(setting, recorded_steps, is_cut=not text.endswith(b"\n"), refused=refused)


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from error


def _lines(path: Path, text: bytes) -> Iterator[Line]:
    *whole, _ = text.split(b"\n")
    for number, part in enumerate(whole, 1):
        try:
            line = decoded(part)
        except NOT_JSON as error:
            raise ConfigError(f"{path} is not a recording: line {number}: {error}") from error
        if isinstance(line, Setting):
            _check(path, line)
        yield line


def _check(path: Path, setting: Setting) -> None:
    if setting.version != VERSION:
        raise ConfigError(f"{path} is of version {setting.version}, but this version reads {VERSION}")
    try:
        setting.cost_model.check()
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
