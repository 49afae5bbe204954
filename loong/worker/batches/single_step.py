"""A batch whose steps the host launches one after the other."""

from itertools import count

from loong.attention.push import await_stored
from loong.core.instructions import RunBatch, RunScoredBatch
from loong.core.prompt_logprobs import PromptLogprobs
from loong.fabric.protocol import Fabric, NoPeers
from loong.worker.batches.lease_ends import LeaseTerm
from loong.worker.batches.started_batch import ReportStep
from loong.worker.batches.step_sync import report_to_holders, sync_step
from loong.worker.batches.token_placeholders import PendingTokens, TokenPlaceholders
from loong.worker.steps.pending_step import PendingStep
from loong.worker.steps.step_inputs import Progress
from loong.worker.steps.step_runner import StepRunner


class HostSteppedBatch:
    """See StartedBatch."""

    def __init__(
        self,
        placeholders: TokenPlaceholders,
        pending_tokens: PendingTokens,
        step_runner: StepRunner,
        fabric: Fabric,
        *,
        is_alone: bool,
    ) -> None:
        """Begin the one step of a single instance at once, unless tokens are still missing."""
        self._placeholders, self._pending_tokens = placeholders, pending_tokens
        self._step_runner, self._fabric = step_runner, fabric
        self._first: PendingStep | None = None
        command = placeholders.command
        self._scored = command.scored if isinstance(command, RunScoredBatch) else ()
        self._prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        is_one_step = placeholders.command.plan.num_steps == 1
        if is_alone and is_one_step and not placeholders.needs_tokens:
            begun = placeholders.begun()
            self._requests = Progress.of(begun.inputs)
            self._first = pending_tokens.pending = step_runner.begin(
                begun.plan,
                self._requests,
                NoPeers(step_runner.instance_id),
                placeholders,
                self._scored,
            )

    @property
    def command(self) -> RunBatch:
        """See StartedBatch."""
        return self._placeholders.command

    def needs_host(self) -> bool:
        """See StartedBatch."""
        return self._first is None

    def is_done(self) -> bool:
        """See StartedBatch."""
        return self._first is not None and self._first.is_done()

    def finish(self, lease_end: LeaseTerm, report: ReportStep) -> int:
        """See StartedBatch."""
        command = self._placeholders.resolved()
        if self._first is None:
            self._requests = Progress.of(command.inputs)
        else:
            for given in command.inputs:
                self._requests[given.request_id].given = given
        plan, requests, holder_ids = command.plan, self._requests, command.holder_ids
        live = set(requests)
        with self._fabric.batch(command.batch_id, plan.group.instance_ids, holder_ids) as batch:
            for step in count():
                step_plan = plan if plan.num_steps == 1 else plan.at_step(step, live)
                begun = self._first or self._step_runner.begin(
                    step_plan, requests, batch, scored=self._scored
                )
                tokens, self._prompt_logprobs = begun.tokens(), begun.prompt_logprobs()
                batch.check()
                if plan.pushes:
                    await_stored(batch, plan, self._step_runner.instance_id)
                is_last = plan.num_steps == 1
                if not is_last:
                    ended = {token.request_id for token in tokens if token.finish_reason is not None}
                    stop = sync_step(batch, plan, ended, live, lease_end)
                    if holder_ids and plan.group.leader_id == self._step_runner.instance_id:
                        report_to_holders(batch, plan, holder_ids, live, stop)
                    is_last = step + 1 >= stop or not live
                if is_last:
                    self._pending_tokens.resolve(tokens)
                report(step, tokens, is_last)
                if is_last:
                    break
                lease_end.wait_for_room(step + 2)
        return step + 1

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """See StartedBatch."""
        return self._prompt_logprobs
