"""A decode lease: each step is launched before the host knows the previous one's tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from loong.core.events import ProducedToken
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId
from loong.core.prompt_logprobs import PromptLogprobs
from loong.fabric.protocol import Fabric, OpenBatch
from loong.worker.backend import Reading
from loong.worker.batches.lease_ends import LeaseTerm
from loong.worker.batches.lease_slots import LeaseSlots, masters_inputs
from loong.worker.batches.lease_steps import LeaseSteps
from loong.worker.batches.started_batch import ReportStep
from loong.worker.batches.step_sync import report_to_holders, sync_step
from loong.worker.batches.token_placeholders import PendingTokens, TokenPlaceholders
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.lease_sampling import LeaseSampling
from loong.worker.steps.decode_graph import DecodeGraph


@dataclass(frozen=True, slots=True)
class DecodeLeases:
    """An instance's part in leases whose steps the devices of a group take by themselves."""

    instance_id: InstanceId
    pool: KVPool
    graph: DecodeGraph
    fabric: Fabric
    constraints: Constraints

    def can_run(self, command: RunBatch) -> bool:
        """Return whether steps of a batch are captured; see `ServedLeases.can_run`."""
        return self.graph.served.can_run(command)


class _Launched(NamedTuple):
    """A lease whose first step was launched."""

    slots: LeaseSlots
    sampling: LeaseSampling
    reading: Reading


class DecodeLease:
    """One of these leases; see StartedBatch.

    Tokens computed after the end of a request or of the lease are dropped. A group learns that its leader
    stops the lease while it takes the next step, which then still counts.
    """

    def __init__(
        self,
        leases: DecodeLeases,
        placeholders: TokenPlaceholders,
        pending_tokens: PendingTokens,
        *,
        is_alone: bool,
    ) -> None:
        """Begin at once on a single instance, unless tokens are still missing."""
        self._instance_id, self._pool, self._graph = leases.instance_id, leases.pool, leases.graph
        self._fabric, self._constraints = leases.fabric, leases.constraints
        self._placeholders, self._pending_tokens = placeholders, pending_tokens
        self._is_alone = is_alone
        self._launched: _Launched | None = None
        if is_alone and not placeholders.needs_tokens:
            self._launched = self._launch(placeholders.begun())

    @property
    def command(self) -> RunBatch:
        """See StartedBatch."""
        return self._placeholders.command

    def needs_host(self) -> bool:
        """See StartedBatch."""
        return True

    def is_done(self) -> bool:
        """See StartedBatch."""
        return False

    def finish(self, lease_end: LeaseTerm, report: ReportStep) -> int:
        """See StartedBatch."""
        command = self._placeholders.resolved()
        group = command.plan.group.instance_ids
        with self._fabric.batch(command.batch_id, group, command.holder_ids) as batch:
            try:
                launched = self._launched or self._launch(command)
                num_steps = self._take_steps(command, launched, batch, lease_end, report)
            finally:
                self._graph.wait()  # no one reads a dropped step, but it writes into slots
        launched.slots.keep(num_steps)
        return num_steps

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """See StartedBatch: a lease computes no prompt."""
        return ()

    def _launch(self, command: RunBatch) -> _Launched:
        slots = LeaseSlots(self._instance_id, self._pool, command, self._graph.least_saved)
        given = masters_inputs(command, self._instance_id)
        rows = {item.request_id: row for row, item in enumerate(given)}
        self._graph.begin(slots.batch, self._placeholders.pending_token_ids(rows))
        sampling = self._graph.sampling(given, self._constraints)
        self._graph.launch()
        return _Launched(slots, sampling, self._graph.read(sampling))

    def _course(self, command: RunBatch) -> LeaseSteps:
        return LeaseSteps.of(command, self._graph.max_num_slots, self._graph.least_saved)

    def _take_steps(
        self,
        command: RunBatch,
        launched: _Launched,
        batch: OpenBatch,
        lease_end: LeaseTerm,
        report: ReportStep,
    ) -> int:
        plan, holder_ids, is_alone = command.plan, command.holder_ids, self._is_alone
        slots, sampling, reading = launched
        rows = dict(enumerate(masters_inputs(command, self._instance_id)))
        live, steps = set(plan.request_ids), self._course(command)
        while True:
            if is_alone:
                steps.end = max(lease_end.step(), steps.step + 1)
            if steps.lengthen():
                lease_end.wait_for_room(steps.num_steps)
                slots.lengthen(steps.num_steps, rows)
                self._graph.lengthen(slots.batch)
            step, is_last = steps.step, steps.is_last
            if not is_last:
                self._graph.launch()
                if not sampling.needs_tokens:
                    coming = self._graph.read(sampling)
            tokens = tuple(_take_tokens(reading.wait(), step, rows, sampling))
            if sampling.needs_tokens and not is_last:
                sampling.end_step()
                coming = self._graph.read(sampling)
            batch.check()
            if is_last:
                self._pending_tokens.resolve(tokens)
            report(step, tokens, is_last)
            ended = {token.request_id for token in tokens if token.finish_reason is not None}
            live -= ended
            if not is_alone and not is_last:
                stop = sync_step(batch, plan, ended, live, lease_end)
                if holder_ids and plan.group.leader_id == self._instance_id:
                    report_to_holders(batch, plan, holder_ids, live, stop)
                steps.end_before(stop)
            if is_last or not live:
                return step + 1
            reading = coming
            steps.step += 1


def _take_tokens(
    read: Sequence[Tensor], step: int, live: dict[int, RequestInput], sampling: LeaseSampling
) -> Iterator[ProducedToken]:
    """Return the tokens of the live requests, and remove those that end with them."""
    token_ids, largest = (values.tolist() for values in read[:2])
    logprobs = sampling.logprobs(read[2:])
    for row, given in list(live.items()):
        params = given.sampling_params
        assert params is not None
        if math.isfinite(largest[row]):
            token_id = token_ids[row]
            reason = params.finish_reason(given.num_output_tokens + step + 1, token_id)
            yield ProducedToken(given.request_id, token_id, reason, logprobs.get(row))
        else:
            token_id, reason = 0, sampling.why_invalid(row, largest[row])
            yield ProducedToken(given.request_id, token_id, reason)
        sampling.take(row, token_id, reason)
        if reason is not None:
            del live[row]
