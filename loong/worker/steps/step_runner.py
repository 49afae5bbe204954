"""Single steps of any batch on one instance: captured if a graph has room, or launched by the host."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, KVPush, QueryBlock
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import RequestId
from loong.fabric.protocol import OpenBatch
from loong.fabric.world import World
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.batches.token_placeholders import TokenPlaceholders
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.sampler import sample
from loong.worker.sampling.sampling_input import DrawnToken, sampling_inputs
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.micro_batches import forward_in_turn
from loong.worker.steps.mixed_graph import MixedGraph
from loong.worker.steps.pending_step import PendingStep, SampledRow
from loong.worker.steps.prompt_scores import PendingScores, scored_rows
from loong.worker.steps.ring_graph import RingGraph
from loong.worker.steps.step_inputs import Progress, StepInputs
from loong.worker.tracer import Span


class StepRunner:
    """Prepares steps and starts them on the device, in the order in which they begin."""

    def __init__(
        self,
        instance_id: InstanceId,
        model: Decoder,
        pool: KVPool,
        world: World,
        backend: Backend,
        constraints: Constraints,
    ) -> None:
        self.instance_id, self._constraints = instance_id, constraints
        self._model, self._pool, self._world, self._backend = model, pool, world, backend
        self._captured: tuple[MixedGraph | RingGraph, ...] = ()

    def capture(self, exchange: KVExchange | None) -> None:
        """Capture graphs; those of groups use `exchange`."""
        self._captured = (MixedGraph(self._model, self._pool, self._backend, exchange),)
        if exchange is not None:
            self._captured += (RingGraph(self._model, self._pool, self._backend, exchange),)
        for captured in self._captured:
            captured.capture()

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""
        yield self, "begin", "step"
        yield self, "_sample", "sample"

    def begin(
        self,
        plan: BatchPlan,
        requests: Mapping[RequestId, Progress],
        batch: OpenBatch,
        placeholders: TokenPlaceholders | None = None,
        scored: Sequence[ScoredChunk] = (),
    ) -> PendingStep:
        """Start a step on the device; `placeholders` stand for tokens that are not known yet.

        One earlier step may be pending. None may be in a group, which has the `batch` open.
        """
        self._allocate(plan, requests)
        placements = {request_id: requests[request_id].placement for request_id in plan.request_ids}
        step = AttentionStep(self.instance_id, plan, placements, self._pool, self._backend.least_saved)
        pending_ids = None
        if placeholders is not None:
            last_rows = {
                b.request_id: rows.stop - 1 for b, rows in step.rows.items() if _is_newest(b, requests)
            }
            pending_ids = placeholders.pending_token_ids(last_rows)
        hidden = self._forward(step, StepInputs.of(step.blocks, requests, pending_ids), batch)
        self._pool.release_positions([(p.block.request_id, p.segment.positions) for p in self._passing(plan)])
        for request_id in plan.request_ids:
            requests[request_id].placement = placements[request_id].adding(plan.writes_of(request_id))
        scores = None
        if scored:  # before sampling: the tensors that are read last are the last to arrive
            rows = list(scored_rows(step, requests, scored))
            scores = PendingScores(rows, hidden, self._model, self._backend)
        return self._sample(step, hidden, requests, scores)

    def _allocate(self, plan: BatchPlan, requests: Mapping[RequestId, Progress]) -> None:
        """Allocate slots for the KV that a step stores here."""
        own = [segment for segment in plan.writes if segment.instance_id == self.instance_id]
        self._pool.allocate_few_each([(s.owner_id, s.positions) for s in own if len(s.positions) == 1])
        for segment in own:
            if len(segment.positions) > 1:
                num_expected = requests[segment.owner_id].given.num_prompt_tokens - segment.positions.start
                self._pool.allocate(segment.owner_id, segment.positions, num_expected)

        for push in self._passing(plan):
            self._pool.allocate(push.block.request_id, push.segment.positions)

    def _passing(self, plan: BatchPlan) -> list[KVPush]:
        """Return what takes slots here for the time of a step, since queries meet it before it has gone."""
        pushes = [push for push in plan.pushes if push.is_attended_in_place]
        return [push for push in pushes if push.block.master_id == self.instance_id]

    def _forward(self, step: AttentionStep, inputs: StepInputs, batch: OpenBatch) -> Tensor:
        """Return hidden states of the step's rows; the host launches the step if no graph has room.

        Graphs expect all KV of a request before its new positions, and none behind them. They reach the
        memory of one host.
        """
        is_near = self._world.is_one_host((*step.batch.group.instance_ids, *step.holder_ids))
        for captured in self._captured if is_near and not step.holder_ids and not step.has_holes else ():
            if (hidden := captured.forward(step, inputs)) is not None:
                return hidden
        columns = tuple(map(self._backend.device.upload, inputs[:3]))
        if inputs.pending_ids is not None:
            inputs.pending_ids.fill(columns[0])
        return forward_in_turn(self._model, columns, step, batch, self._backend.device)

    def _sample(
        self,
        step: AttentionStep,
        hidden: Tensor,
        requests: Mapping[RequestId, Progress],
        scores: PendingScores | None,
    ) -> PendingStep:
        """Sample the next token of every request whose last known token is among this instance's rows."""
        hidden_rows: list[int] = []
        drawn: list[DrawnToken] = []
        for block, block_rows in step.rows.items():
            if _is_newest(block, requests):
                of_request = [*requests[block.request_id].drawn()]
                hidden_rows += [block_rows.stop - 1] * len(of_request)
                drawn += of_request
        inputs = sampling_inputs(drawn, self._constraints)
        request_ids = [row.drawn.request_id for row in drawn]
        pending_ids = [
            SampledRow(i, item, requests.get(i)) for i, item in zip(request_ids, inputs, strict=True)
        ]
        device, choice = self._backend.device, None
        if pending_ids:
            logits = self._model.logits(hidden[device.upload(torch.tensor(hidden_rows))])
            choice = sample(logits, [row.given for row in pending_ids], self._backend.sampler)
        reading = self._backend.read(*(() if choice is None else choice.tensors))
        return PendingStep(pending_ids, choice, reading, device, self._constraints, scores)


def _is_newest(block: QueryBlock, requests: Mapping[RequestId, Progress]) -> bool:
    """Return whether the newest known token of a request is in a block."""
    return block.positions[-1] == requests[block.request_id].num_known_tokens - 1
