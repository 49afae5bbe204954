"""The logs of a run, real or simulated, as far as they were asked for."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loong.core.errors import ConfigError
from loong.core.observer import Observer
from loong.observability.decision_log.line_file import LineFile
from loong.observability.decision_log.log import Listener, TargetsOf, decision_log, no_targets
from loong.observability.recording.lines import Setting
from loong.observability.recording.recorder import check_new, recording
from loong.runs.outputs import check_file


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Paths of the logs; None for a log that is not written.

    `keeps_prompts` puts the token ids of prompts into the event log. Raises `ConfigError` if both logs have
    one path.
    """

    decisions: Path | None = None
    events: Path | None = None
    keeps_prompts: bool = False

    def __post_init__(self) -> None:
        if self.decisions and self.events and self.decisions.resolve() == self.events.resolve():
            raise ConfigError(f"--decision-log and --event-log are both {self.events}; name two files")

    def check(self) -> None:
        """Raise `ConfigError` if a file cannot be made or is another's, before long work starts."""
        if self.events is not None:
            check_new(self.events)
        for flag, path in (("--event-log", self.events), ("--decision-log", self.decisions)):
            if path is not None:
                check_file(flag, path)
        if self.decisions is not None and self.decisions.exists():
            LineFile(self.decisions).close()  # refused if another process has it


@contextmanager
def run_logs(
    files: LogFiles,
    setting: Setting,
    clock_start: float | None = None,
    listeners: Sequence[Listener] = (),
    targets_of: TargetsOf = no_targets,
) -> Iterator[tuple[Observer, ...]]:
    """Yield the observers of a run that write its logs.

    `clock_start` is the Unix time of its clock's 0, None if virtual.

    `listeners` receive every line of the decision log, also without a file. `targets_of` are the targets of
    requests without their own. Raises `ConfigError` if a file cannot be made.
    """
    observers: list[Observer] = []
    with ExitStack() as stack:
        if files.events is not None:  # first: it may be refused, and the other writes at once
            recorder = recording(files.events, setting, keeps_prompts=files.keeps_prompts)
            observers.append(stack.enter_context(recorder))
        if files.decisions is not None or listeners:
            log = decision_log(files.decisions, clock_start, listeners, setting.policy, targets_of)
            observers.append(stack.enter_context(log))
        yield tuple(observers)
