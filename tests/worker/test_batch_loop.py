"""Batches begin and end in order, also behind one that failed."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue

import pytest
from plans import prefill
from requests_for_tests import random_prompt, sampled_request

from loong.core.instructions import RunBatch
from loong.core.prompt_logprobs import PromptLogprobs
from loong.fabric.errors import PeerError
from loong.messages.wire import BatchBegun, BatchDone, BatchFailed, ForgetFailures, PromptScored, StepDone
from loong.state.live_request import LiveRequest
from loong.worker.batch_loop import BatchLoop
from loong.worker.batches.lease_ends import LeaseEnds, LeaseTerm
from loong.worker.batches.started_batch import ReportStep


class RecordedRunner:
    """A runner whose device is done at once, or never by itself. `story` is what happened, in order."""

    def __init__(self, failing_ids: Sequence[int], *, is_quick: bool) -> None:
        self.story: list[tuple[str, int]] = []
        self.failing_ids, self.is_quick = failing_ids, is_quick

    def begin(self, command: RunBatch, meanwhile: Callable[[], None]) -> "RecordedBatch":
        self.story.append(("begin", command.batch_id))
        meanwhile()
        self.story.append(("begun", command.batch_id))
        return RecordedBatch(self, command)

    def abandon(self, command: RunBatch) -> None:
        self.story.append(("abandon", command.batch_id))


class RecordedBatch:
    def __init__(self, runner: RecordedRunner, command: RunBatch) -> None:
        self._runner, self.command = runner, command

    def needs_host(self) -> bool:
        return False

    def is_done(self) -> bool:
        return self._runner.is_quick

    def finish(self, lease_end: LeaseTerm, report: ReportStep) -> int:
        del lease_end, report
        self._runner.story.append(("finish", self.command.batch_id))
        if self.command.batch_id in self._runner.failing_ids:
            raise PeerError("a message", 1, 0, "is silent")
        return 1

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        return ()


def carried_out(runner: RecordedRunner, names: str) -> list[tuple[str, int]]:
    """Return the reports of batches 1, 2, ..., each of the request with this name. All are there at once."""
    lives = {name: LiveRequest(sampled_request(random_prompt(4, seed=4), 4)) for name in sorted({*names})}
    reports: list[tuple[str, int]] = []

    def send(*sent: BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed) -> None:
        reports.extend((type(report).__name__, report.batch_id) for report in sent)

    loop = BatchLoop(0, 0, runner, LeaseEnds(1.0), send, lambda: None)  # type: ignore[arg-type]  # acts as one
    commands: SimpleQueue[RunBatch | ForgetFailures | None] = SimpleQueue()
    for number, name in enumerate(names, start=1):
        plan = prefill([lives[name].view()], (0,))
        commands.put(RunBatch(number, plan, (lives[name].input_for(plan),)))
    for _ in names:
        loop.turn(commands)
    commands.put(None)
    loop.turn(commands)
    return reports


@pytest.mark.parametrize("is_quick", [False, True])
def test_one_ends_while_the_next_begins_or_then(is_quick: bool) -> None:
    runner = RecordedRunner((), is_quick=is_quick)
    reports = carried_out(runner, "abc")
    assert reports == [(kind, number) for number in (1, 2, 3) for kind in ("BatchBegun", "BatchDone")]
    middle = [("finish", 1), ("begun", 2)] if is_quick else [("begun", 2), ("finish", 1)]
    assert runner.story[:5] == [("begin", 1), ("begun", 1), ("begin", 2), *middle]


@pytest.mark.parametrize("is_quick", [False, True])
def test_one_that_cannot_begin_is_abandoned_after_all_before_it(is_quick: bool) -> None:
    runner = RecordedRunner((1,), is_quick=is_quick)
    reports = carried_out(runner, "abad")
    ended = [(kind, number) for kind, number in reports if kind != "BatchBegun"]
    assert ended == [("BatchFailed", 1), ("BatchDone", 2), ("BatchFailed", 3), ("BatchDone", 4)]
    assert [number for kind, number in reports if kind == "BatchBegun"] == [1, 2, 4]
    assert runner.story.index(("finish", 2)) < runner.story.index(("abandon", 3))
    assert ("begin", 3) not in runner.story
