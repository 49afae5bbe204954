"""The protocol of a batch that is carried out: begun, perhaps before the previous one ends, and finished."""

from collections.abc import Callable
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.instructions import RunBatch
from loong.core.prompt_logprobs import PromptLogprobs
from loong.worker.batches.lease_ends import LeaseTerm

ReportStep = Callable[[int, tuple[ProducedToken, ...], bool], None]  # a step, its tokens, whether it is last


class StartedBatch(Protocol):
    """A batch whose work the device may have already.

    Batches are begun and finished in order. A batch that does not need the host may be finished while the
    next one begins, or later.
    """

    @property
    def command(self) -> RunBatch:
        """Return the batch as it was submitted."""

    def needs_host(self) -> bool:
        """Return whether it must be finished before another begins, as the device needs the host for it."""

    def is_done(self) -> bool:
        """Return whether the device has done all of it, if it does not need the host."""

    def finish(self, lease_end: LeaseTerm, report: ReportStep) -> int:
        """Take its steps and return how many; each is reported with its tokens of this instance.

        The last step is marked as such, unless that was not known when its tokens were. A lease ends before
        the step that `lease_end` of the group's leader names, or when all its requests have ended. All
        instances end at the same step.
        """

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Return the log probabilities of prompts on this instance, once the batch is finished."""
