"""What it is to carry out a batch: to begin it, perhaps before the one before has ended, and to finish it."""

from collections.abc import Callable
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.instructions import RunBatch
from loong.core.prompt_logprobs import PromptLogprobs
from loong.worker.batches.lease_ends import LeaseTerm

ReportStep = Callable[[int, tuple[ProducedToken, ...], bool], None]  # a step, its tokens, whether it is last


class StartedBatch(Protocol):
    """A batch that the device may have been asked for already.

    Batches are begun and finished in their order. One that does not need the host may be finished after the
    next has begun, but before that is finished.
    """

    @property
    def command(self) -> RunBatch:
        """The batch as it was told."""

    def needs_host(self) -> bool:
        """Whether nothing may begin before it is finished: the device does not work on it by itself."""

    def is_done(self) -> bool:
        """Whether the device has done all of it, if it does not need the host."""

    def finish(self, lease_end: LeaseTerm, report: ReportStep) -> int:
        """Take its steps and return how many; each is reported with its tokens of this instance.

        With the last it is said that it is, unless that was not known when its tokens were. A lease ends
        before the step that `lease_end` of the group's leader names, or when all its requests have ended. All
        instances end at the same step.
        """

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Return what this instance found of prompts, once the batch is finished."""
