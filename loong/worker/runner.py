"""Carries out one batch on one instance: a step, or the steps of a lease."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from loong.attention.elastic import ElasticAttention
from loong.attention.step import Step
from loong.core.events import ProducedToken
from loong.core.instance import ESPGroup
from loong.core.instructions import Fork, RequestInput, RunBatch
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import RequestId, SamplingParams, TokenId
from loong.fabric.protocol import Fabric
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.constraints import Constraints
from loong.worker.decode_lease import DecodeLease, ReportStep
from loong.worker.decode_state import BATCH_SIZES
from loong.worker.decode_steps import DecodeSteps
from loong.worker.edges import settle
from loong.worker.kv_pool import KVPool
from loong.worker.kv_steps import KVSteps
from loong.worker.lease_choices import why_invalid
from loong.worker.lease_ends import LeaseTerm
from loong.worker.mixed_steps import MixedSteps
from loong.worker.sampling import InvalidLogits, sample
from loong.worker.sampling_input import SamplingInput, sampling_input
from loong.worker.tracer import Span

_SHORT_PROMPT = 17  # tokens
_PLAIN = SamplingParams()
_ASKING = SamplingParams(  # for all that is done to logits
    max_tokens=2,
    min_tokens=1,
    stop_token_ids=(0,),
    presence_penalty=1.0,
    logit_bias=((0, 1.0),),
    num_logprobs=1,
)
_WARM_UP_BATCH_ID = 0


@dataclass(slots=True)
class _Progress:
    """One request of the batch, as this instance knows it: `new_token_ids` only if it is the master."""

    given: RequestInput
    placement: Placement
    new_token_ids: list[TokenId]

    def token_ids(self, block: QueryBlock) -> Sequence[TokenId]:
        """The ids of a block's positions: given with the batch, or (in a lease) sampled last."""
        if self.new_token_ids:
            return self.new_token_ids[-1:]
        positions = block.positions
        if len(positions) == len(self.given.token_ids):  # as of decodes: all that is given
            return self.given.token_ids
        first = self.given.placement.num_tokens
        return self.given.token_ids[positions.start - first : positions.stop - first : positions.step]

    @property
    def num_known_tokens(self) -> int:
        """Where the next token goes, once all that is known is computed."""
        return self.given.num_prompt_tokens + self.given.num_output_tokens + len(self.new_token_ids)

    def sampling_inputs(self, constraints: Constraints) -> Iterator[tuple[RequestId, SamplingInput]]:
        """How to draw the next token, and that of each fork; nothing if the batch stops short of it."""
        given = self.given
        if given.sampling_params is not None:
            for drawn in (Fork(given.request_id, given.sampling_params), *given.forks):
                yield drawn.request_id, sampling_input(drawn, given, self.new_token_ids, constraints)


class BatchRunner:
    """Runs batches on one instance; the other instances of the group do the same at the same time."""

    def __init__(
        self,
        instance_id: InstanceId,
        model: Decoder,
        pool: KVPool,
        fabric: Fabric,
        backend: Backend,
        constraints: Constraints | None = None,
    ) -> None:
        """Take an instance's parts; without `constraints`, requests with a schema fail."""
        self._constraints = constraints or Constraints(None, model.shard.config.vocab_size)
        self._instance_id = instance_id
        self._model, self._pool, self._fabric, self._backend = model, pool, fabric, backend
        self._exchange = backend.query_exchange(fabric, model.shard)
        self._lease: DecodeLease | None = None
        self._steps: DecodeSteps | None = None
        self._captured: tuple[MixedSteps | KVSteps, ...] = ()

    def warm_up(self) -> None:
        """Do once, before there are requests, what compiles, captures or plans.

        Ranks of one instance do so together, in a batch that comes before all others.
        """
        is_alone = self._fabric.tensor_parallel.size == 1
        with nullcontext() if is_alone else self._fabric.batch(_WARM_UP_BATCH_ID, (self._instance_id,)):
            self._warm_up()
        self._backend.end_warm_up()

    def _warm_up(self) -> None:
        shard = self._model.shard
        config = shard.config
        self._backend.device.plan_attention(
            shard.num_heads, shard.num_kv_heads, config.head_dim, config.torch_dtype
        )
        for length in self._backend.warm_up_lengths:
            self._run_zeros([length], Transfer.KV, num_chunks=2)
            self._run_zeros([length], Transfer.QUERY, num_chunks=2)
        if self._backend.warm_up_lengths:
            self._run_zeros([1], Transfer.QUERY, params=_ASKING)
            for size in BATCH_SIZES:
                if size.bit_count() == 1:  # kernels differ by powers of two
                    self._run_zeros([_SHORT_PROMPT, *[1] * size], Transfer.QUERY)
        if self._backend.takes_leases:
            exchange = self._backend.group_exchange(self._fabric, self._instance_id, self._model.shard)
            steps = DecodeSteps(self._instance_id, self._model, self._pool, self._backend, exchange)
            steps.capture()
            self._lease = DecodeLease(self._instance_id, self._pool, steps, self._fabric, self._constraints)
            self._steps = steps
            self._captured = (MixedSteps(self._model, self._pool, self._backend, exchange),)
            if exchange is not None:
                self._captured += (KVSteps(self._model, self._pool, self._backend, exchange),)
            for captured in self._captured:
                captured.capture()

    def run(self, command: RunBatch, lease_end: LeaseTerm, report: ReportStep) -> int:
        """Take the steps of a batch and return how many; each is reported with its tokens of this instance.

        With the last it is said that it is, unless that was not known when its tokens were. A lease ends
        before the step that `lease_end` of the group's leader names, or when all its requests have ended. All
        instances end at the same step.
        """
        if self._lease is not None and self._lease.can_run(command):
            return self._lease.run(command, lease_end, report)
        plan = command.plan
        requests = {given.request_id: _Progress(given, given.placement, []) for given in command.inputs}
        live = set(requests)
        with self._fabric.batch(command.batch_id, plan.group.instance_ids):
            for step in count():
                step_plan = plan if plan.num_steps == 1 else plan.at_step(step, live)
                tokens = self._take_step(step_plan, requests)
                self._fabric.check()
                is_last = plan.num_steps == 1
                if not is_last:
                    ended = {token.request_id for token in tokens if token.finish_reason is not None}
                    stop = settle(self._fabric, plan, ended, live, lease_end)
                    is_last = step + 1 >= stop or not live
                report(step, tokens, is_last)
                if is_last:
                    break
                lease_end.wait_for_room(step + 2)
        return step + 1

    def spans(self) -> Iterator[Span]:
        """What of this is worth to be told apart in a trace."""
        yield self, "_take_step", "step"
        yield self, "_sample", "sample"
        yield self._fabric, "ring_step", "ring step"
        yield self._fabric, "exchange", "exchange"
        device = self._backend.device
        yield device, "attend_slots", "attention"
        yield device, "attend_blocks", "attention"
        yield device, "linear", "linear"
        if self._steps is not None:
            yield self._steps, "launch", "step"

    def _run_zeros(
        self,
        lengths: Sequence[int],
        transfer: Transfer,
        num_chunks: int = 1,
        params: SamplingParams = _PLAIN,
    ) -> None:
        """Steps of chunks of these lengths, each behind those before, as far as there is room for them.

        A prompt of one token is as a decode.
        """
        prompts = {f"warm-up-{number}": length for number, length in enumerate(lengths)}
        placements = dict.fromkeys(prompts, Placement())
        for chunk in range(num_chunks):
            if sum(lengths) > self._pool.num_free:
                break
            positions = {i: range(chunk * length, (chunk + 1) * length) for i, length in prompts.items()}
            plan = BatchPlan(
                ESPGroup((self._instance_id,)),
                tuple(QueryBlock(i, its, self._instance_id, transfer) for i, its in positions.items()),
                tuple(KVSegment(i, its, self._instance_id) for i, its in positions.items()),
            )
            given = (
                RequestInput(i, [0] * length, (chunk + 1) * length, 0, placements[i], params)
                for i, length in prompts.items()
            )
            requests = {item.request_id: _Progress(item, item.placement, []) for item in given}
            self._take_step(plan, requests)
            placements = {i: request.placement for i, request in requests.items()}
        for request_id in prompts:
            self._pool.release(request_id)

    def _take_step(self, plan: BatchPlan, requests: dict[RequestId, _Progress]) -> tuple[ProducedToken, ...]:
        self._allocate(plan, requests)
        placements = {request_id: requests[request_id].placement for request_id in plan.request_ids}
        step = Step(self._instance_id, plan, placements, self._pool)
        hidden = self._forward(step, *_inputs(step.blocks, requests))
        for request_id in plan.request_ids:
            requests[request_id].placement = placements[request_id].adding(plan.writes_of(request_id))
            self._fork(requests[request_id])
        return self._sample(step, hidden, requests)

    def _allocate(self, plan: BatchPlan, requests: Mapping[RequestId, _Progress]) -> None:
        """Take slots for what a step stores here."""
        own = [segment for segment in plan.writes if segment.instance_id == self._instance_id]
        self._pool.allocate_few_each([(s.owner_id, s.positions) for s in own if len(s.positions) == 1])
        for segment in own:
            if len(segment.positions) > 1:
                num_expected = requests[segment.owner_id].given.num_prompt_tokens - segment.positions.start
                self._pool.allocate(segment.owner_id, segment.positions, num_expected)

    def _forward(self, step: Step, token_ids: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states of the step's rows; if a captured step has no room for them, the host launches it."""
        for captured in self._captured:
            if (hidden := captured.forward(step, token_ids, positions, lengths)) is not None:
                return hidden
        device = self._backend.device
        attention = ElasticAttention(step, self._fabric, self._exchange, device)
        token_ids, positions, lengths = map(device.upload, (token_ids, positions, lengths))
        return self._model.forward(token_ids, positions, lengths, attention)

    def _fork(self, request: _Progress) -> None:
        """Let forks begin with what this instance has of a request."""
        for fork in request.given.forks:
            for positions in request.placement.on(self._instance_id):
                self._pool.share(request.given.request_id, fork.request_id, positions)

    def _sample(
        self, step: Step, hidden: Tensor, requests: dict[RequestId, _Progress]
    ) -> tuple[ProducedToken, ...]:
        """Draw the next token of every request whose last known token is among this instance's rows."""
        rows, inputs, request_ids = [], [], []
        for block, block_rows in step.rows.items():
            request = requests[block.request_id]
            if block.positions[-1] != request.num_known_tokens - 1:
                continue
            for request_id, item in request.sampling_inputs(self._constraints):
                rows.append(block_rows.stop - 1)
                inputs.append(item)
                request_ids.append(request_id)
        if not rows:
            self._backend.device.wait()  # as reading tokens would: what is told to be done is done
            return ()
        last_of_requests = hidden[self._backend.device.upload(torch.tensor(rows))]
        drawn = sample(self._model.logits(last_of_requests), inputs, self._backend.sampler)
        tokens = []
        for request_id, given, result in zip(request_ids, inputs, drawn, strict=True):
            if isinstance(result, InvalidLogits):
                tokens.append(ProducedToken(request_id, 0, why_invalid(given.allowed)))
                continue
            if request_id in requests:  # else it is a fork
                requests[request_id].new_token_ids.append(result.token_id)
            reason = given.params.finish_reason(given.num_output_tokens + 1, result.token_id)
            if reason is not None:
                self._constraints.forget(request_id)
            tokens.append(ProducedToken(request_id, result.token_id, reason, result.logprobs))
        return tuple(tokens)


def _inputs(
    blocks: tuple[QueryBlock, ...], requests: dict[RequestId, _Progress]
) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, positions and sequence lengths of the rows of a step, each [T] int64.

    The sequence length of a token is what its request had when it was first computed, however often and
    in whatever chunks it is: the whole prompt for a token of the prompt, itself and all before for others.
    """
    token_ids: list[TokenId] = []
    positions: list[int] = []
    counts, num_prompt_tokens = [], []
    for block in blocks:
        request = requests[block.request_id]
        token_ids += request.token_ids(block)
        positions += block.positions
        counts.append(len(block.positions))
        num_prompt_tokens.append(request.given.num_prompt_tokens)
    columns = np.array([token_ids, positions, np.repeat(num_prompt_tokens, counts)], np.int64)
    np.maximum(columns[1] + 1, columns[2], out=columns[2])
    ids_there, positions_there, lengths = torch.from_numpy(columns)
    return ids_there, positions_there, lengths
