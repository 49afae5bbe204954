"""The part of a worker that its role has besides KV: a model whose tokens it computes, or none."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.exchange import load_kernels, packed
from loong.attention.remote import query_layout
from loong.core.grammar import Grammar
from loong.core.instance import ESPGroup, InstanceKind
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import RequestId
from loong.fabric.protocol import Fabric
from loong.kernels import Partial
from loong.model.load import load_model
from loong.model.tensor_parallel import Shard, SingleDevice, TensorParallel
from loong.worker.backend import Backend
from loong.worker.config import WorkerConfig
from loong.worker.kv.pool import KVPool
from loong.worker.runner import WARM_UP_BATCH_ID, BatchRunner
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.mask_processes import MaskProcesses
from loong.worker.steps.served_leases import ServedLeases
from loong.worker.tracer import Span


class WorkerPart(Protocol):
    """The part of a worker that depends on its role."""

    def prepare(self, grammar: Grammar) -> "Future[int]":
        """Compile a grammar. The future's value has no meaning."""

    def forget(self, owner_id: RequestId) -> None:
        """Drop what is known of a request."""

    def warm_up(self, pool: KVPool) -> ServedLeases | None:
        """Prepare for work. Return the captured steps that serve others, if there are any."""

    @property
    def runner(self) -> BatchRunner | None:
        """The runner of batches, once it is warm; None if there are none to run."""

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""


class ModelPart:
    """The model of an instance, and what runs its batches."""

    def __init__(
        self,
        config: WorkerConfig,
        shard: Shard,
        fabric: Fabric,
        backend: Backend,
        masks: MaskProcesses | None,
    ) -> None:
        """Load the weights. `masks` are the result of `start_masks`."""
        self._config, self._fabric, self._backend = config, fabric, backend
        ranks: TensorParallel = SingleDevice() if config.tp_size == 1 else fabric.tensor_parallel
        self._model = load_model(
            config.model,
            config.load_format,
            config.dtype,
            config.seed,
            ranks,
            backend.device,
            config.quantization,
            config.kv_cache_dtype,
        )
        has_others = config.tokenizer_folder is not None and config.tp_size > 1
        broadcast = self._broadcast if has_others else None
        self._constraints = Constraints(masks, shard.config.vocab_size, broadcast=broadcast)
        self.runner: BatchRunner | None = None

    def prepare(self, grammar: Grammar) -> "Future[int]":
        """See WorkerPart."""
        return self._constraints.prepare(grammar)

    def forget(self, owner_id: RequestId) -> None:
        """See WorkerPart."""
        self._constraints.forget(owner_id)

    def warm_up(self, pool: KVPool) -> ServedLeases | None:
        """See WorkerPart."""
        config = self._config
        self.runner = BatchRunner(
            config.instance_id,
            self._model,
            pool,
            self._fabric,
            self._backend,
            self._constraints,
            config.max_lease_slots,
        )
        self.runner.warm_up()
        return self.runner.served

    def spans(self) -> Iterator[Span]:
        """See WorkerPart."""
        if self.runner is not None:
            yield from self.runner.spans()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor [...] int64 on all ranks of the instance, in an open batch."""
        return self._fabric.broadcast(tensor.flatten()).view(tensor.shape)


class MemoryPart:
    """Nothing but what a memory instance needs to serve leases by captured steps, where there are any."""

    runner = None

    def __init__(self, config: WorkerConfig, shard: Shard, fabric: Fabric, backend: Backend) -> None:
        self._config, self._shard = config, shard
        self._fabric, self._backend = fabric, backend

    def prepare(self, grammar: Grammar) -> "Future[int]":  # noqa: ARG002 - see WorkerPart
        """See WorkerPart: it samples no token."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def forget(self, owner_id: RequestId) -> None:
        """See WorkerPart: it knows of no request but its KV."""

    def warm_up(self, pool: KVPool) -> ServedLeases | None:
        """See WorkerPart. Ranks of one instance do so together, in a batch that comes before all others."""
        is_alone, own = self._config.tp_size == 1, (self._config.instance_id,)
        with nullcontext() if is_alone else self._fabric.batch(WARM_UP_BATCH_ID, own):
            served = self._warm_up(pool)
        self._backend.end_warm_up()
        return served

    def _warm_up(self, pool: KVPool) -> ServedLeases | None:
        backend, instance_id = self._backend, self._config.instance_id
        device = backend.device
        q, kv = self._shard.zero_queries(1, device.torch_device), pool.layer(0)[:1]
        device.plan_attention(q, kv, pool.layout.windows)
        load_kernels(device, q, kv)
        with torch.inference_mode():  # what is captured below is written outside of it as well
            for num_queries in (1, *backend.warm_up_lengths):
                self._attend_zeros(pool, num_queries)
        if not backend.takes_leases:
            return None
        served = ServedLeases.of(
            instance_id,
            self._shard,
            pool,
            backend,
            self._fabric.world,
            backend.group_exchange(self._fabric, instance_id, self._shard),
            self._config.max_lease_slots,
        )
        served.capture()
        return served

    def _attend_zeros(self, pool: KVPool, num_queries: int) -> None:
        """Attend queries of another instance over as many keys, so that all kernels for that are loaded."""
        owner_id, instance_id, device = "warm-up", self._config.instance_id, self._backend.device
        keys, other_id = range(min(num_queries, pool.room)), instance_id + 1
        positions = range(len(keys), len(keys) + num_queries)
        batch = BatchPlan(
            ESPGroup((other_id,)),
            (QueryBlock(owner_id, positions, other_id, Transfer.QUERY),),
            (KVSegment(owner_id, positions, other_id),),
        )
        placement = Placement((KVSegment(owner_id, keys, instance_id),))
        pool.allocate(owner_id, keys)
        step = AttentionStep(instance_id, batch, {owner_id: placement}, pool, self._backend.least_saved)
        attention = query_layout(step, device).peer_attention
        if attention is not None:
            queries = self._shard.zero_queries(num_queries, device.torch_device)
            part = Partial.unseen(queries, is_merged=attention.is_merged)
            windows = pool.layout.layer_windows or (None,)
            layer = windows.index(None) if None in windows else 0  # the slots are of one without a window
            attention.merge_into(part, queries, pool.layer(layer), device)
            packed(part, queries.dtype)
        pool.release(owner_id)

    def spans(self) -> Iterator[Span]:
        """See WorkerPart."""
        yield from ()


def part_of(
    config: WorkerConfig, shard: Shard, fabric: Fabric, backend: Backend, masks: MaskProcesses | None
) -> WorkerPart:
    """Return the part of a worker by its role."""
    if config.kind is InstanceKind.ATTENTION:
        return MemoryPart(config, shard, fabric, backend)
    return ModelPart(config, shard, fabric, backend, masks)
