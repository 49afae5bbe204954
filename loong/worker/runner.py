"""Carries out batches on one instance: a step each, or the steps of a lease."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress

from loong.attention import ring
from loong.attention.exchange import QueryExchange, load_kernels
from loong.core.errors import ClusterError
from loong.core.instance import MAX_SERVED_LISTS, ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import SamplingParams
from loong.fabric.protocol import Fabric, NoPeers
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.batches.decode_lease import DecodeLease, DecodeLeases
from loong.worker.batches.lease_ends import LeaseTerm
from loong.worker.batches.single_step import HostSteppedBatch
from loong.worker.batches.started_batch import ReportStep, StartedBatch
from loong.worker.batches.token_placeholders import PendingTokens, TokenPlaceholders
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.steps.decode_graph import DecodeGraph
from loong.worker.steps.decode_state import BATCH_SIZES
from loong.worker.steps.served_leases import ServedLeases
from loong.worker.steps.step_inputs import Progress
from loong.worker.steps.step_runner import StepRunner
from loong.worker.tracer import Span

_SHORT_PROMPT = 17  # tokens
_PLAIN = SamplingParams()
_ASKING = SamplingParams(  # that use every operation on logits
    max_tokens=2,
    min_tokens=1,
    stop_token_ids=(0,),
    presence_penalty=1.0,
    logit_bias=((0, 1.0),),
    num_logprobs=1,
    allowed_token_ids=(0, 1),
    bad_words=((0, 1),),
)
WARM_UP_BATCH_ID = 0


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
        max_lease_slots: int | None = None,
    ) -> None:
        """Take an instance's parts; without `constraints`, requests with a grammar fail.

        A captured lease can list `max_lease_slots` slots on an instance (None: by the size of the own pool).
        """
        self._max_lease_slots = max_lease_slots or MAX_SERVED_LISTS * (pool.num_free + pool.num_used)
        self._constraints = constraints or Constraints(None, model.shard.config.vocab_size)
        self._instance_id = instance_id
        self._model, self._pool, self._fabric, self._backend = model, pool, fabric, backend
        self._step_runner = StepRunner(instance_id, model, pool, fabric.world, backend, self._constraints)
        self.leases: DecodeLeases | None = None  # once there are captured steps
        self.served: ServedLeases | None = None  # as well
        self._pending_tokens = PendingTokens(WARM_UP_BATCH_ID)

    def warm_up(self) -> None:
        """Compile kernels, capture graphs and plan, before there are requests.

        Ranks of one instance do so together, in a batch that comes before all others.
        """
        is_alone = self._fabric.tensor_parallel.size == 1
        with nullcontext() if is_alone else self._fabric.batch(WARM_UP_BATCH_ID, (self._instance_id,)):
            self._warm_up()
        self._backend.end_warm_up()

    def _warm_up(self) -> None:
        device = self._backend.device
        q, kv = self._model.shard.zero_queries(1, device.torch_device), self._pool.layer(0)[:1]
        device.plan_attention(q, kv, self._pool.layout.windows)
        load_kernels(device, q, kv)
        if lengths := self._backend.warm_up_lengths:
            self._model.parameters.load_products(device, max(lengths), max(BATCH_SIZES))
            for length in lengths:
                self._run_zeros([length], Transfer.KV, num_chunks=2)
                self._run_zeros([length], Transfer.QUERY, num_chunks=2)
            self._run_zeros([1], Transfer.QUERY, params=_ASKING)
            for size in BATCH_SIZES:
                if size.bit_count() == 1:  # kernels differ by powers of two
                    self._run_zeros([_SHORT_PROMPT, *[1] * size], Transfer.QUERY)
        if self._backend.takes_leases:
            exchange = self._backend.group_exchange(self._fabric, self._instance_id, self._model.shard)
            self.served = ServedLeases.of(
                self._instance_id,
                self._model.shard,
                self._pool,
                self._backend,
                self._fabric.world,
                exchange,
                self._max_lease_slots,
            )
            step_runner = DecodeGraph(
                self._instance_id, self._model, self._pool, self._backend, exchange, self.served
            )
            step_runner.capture()
            self.leases = DecodeLeases(
                self._instance_id, self._pool, step_runner, self._fabric, self._constraints
            )
            self._step_runner.capture(exchange)

    def run(self, command: RunBatch, lease_end: LeaseTerm, report: ReportStep) -> int:
        """Begin a batch and finish it; see `StartedBatch.finish`."""
        return self.begin(command).finish(lease_end, report)

    def begin(self, command: RunBatch, meanwhile: Callable[[], None] = lambda: None) -> StartedBatch:
        """Begin the next batch, as far as the device can run it after the previous one.

        Launching a long step takes as long as most of it. `meanwhile` is called during it, and may finish the
        previous batch.
        """
        device = self._backend.device
        device.next_batch()
        with device.calling(meanwhile):
            return self._begin(command)

    def _begin(self, command: RunBatch) -> StartedBatch:
        placeholders, pending_tokens = (
            TokenPlaceholders(command, self._instance_id, self._pending_tokens),
            PendingTokens(command.batch_id),
        )
        self._pending_tokens = pending_tokens
        is_alone = self._is_alone(command)
        is_stepped = is_alone and command.plan.num_steps == 1  # the next can begin before that has ended
        if self.leases is not None and not is_stepped and self.leases.can_run(command):
            return DecodeLease(self.leases, placeholders, pending_tokens, is_alone=is_alone)
        return HostSteppedBatch(
            placeholders, pending_tokens, self._step_runner, self._fabric, is_alone=is_alone
        )

    def abandon(self, command: RunBatch) -> None:
        """Leave a batch that cannot begin here, so that its other members do not wait for this one."""
        if self._is_alone(command):
            return
        group = command.plan.group.instance_ids
        with suppress(ClusterError), self._fabric.batch(command.batch_id, group, command.holder_ids):
            raise ClusterError(f"batch {command.batch_id} cannot begin")

    def _is_alone(self, command: RunBatch) -> bool:
        return len(command.participant_ids) == 1 and self._fabric.tensor_parallel.size == 1

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""
        yield from self._step_runner.spans()
        yield ring, "ring_step", "ring step"
        yield QueryExchange, "send_queries", "exchange"
        yield QueryExchange, "send_partials", "exchange"
        device = self._backend.device
        yield device, "attend_slots", "attention"
        yield device, "attend_blocks", "attention"
        yield device, "linear", "linear"
        if self.leases is not None:
            yield self.leases.graph, "launch", "step"

    def _run_zeros(
        self,
        lengths: Sequence[int],
        transfer: Transfer,
        num_chunks: int = 1,
        params: SamplingParams = _PLAIN,
    ) -> None:
        """Run steps of chunks of these lengths, each continuing the ones before, as far as there is room.

        A prompt of one token counts as a decode.
        """
        prompts = {f"warm-up-{number}": length for number, length in enumerate(lengths)}
        placements = dict.fromkeys(prompts, Placement())
        for chunk in range(num_chunks):
            if sum(lengths) > self._pool.room:
                break
            positions = {i: range(chunk * length, (chunk + 1) * length) for i, length in prompts.items()}
            plan = BatchPlan(
                ESPGroup((self._instance_id,)),
                tuple(QueryBlock(i, its, self._instance_id, transfer) for i, its in positions.items()),
                tuple(KVSegment(i, its, self._instance_id) for i, its in positions.items()),
            )
            given = [
                RequestInput(i, [0] * length, (chunk + 1) * length, 0, placements[i], params)
                for i, length in prompts.items()
            ]
            requests = Progress.of(given)
            self._step_runner.begin(plan, requests, NoPeers(self._instance_id)).tokens()
            placements = {i: request.placement for i, request in requests.items()}
        for request_id in prompts:
            self._pool.release(request_id)
