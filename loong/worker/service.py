"""Attention over the KV of this instance for batches of groups in which it is no member."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count
from threading import Thread
from typing import TypeAlias

import torch

from loong.attention.attention_step import AttentionStep
from loong.attention.exchange import QueryExchange
from loong.attention.pool import MOST_COPIED
from loong.attention.push import IncomingPushes
from loong.attention.remote import query_attention, query_layout
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId
from loong.fabric.errors import AbandonedError, PeerLostError
from loong.fabric.protocol import Exchanging, Fabric
from loong.kernels import Partial
from loong.model.tensor_parallel import Shard
from loong.worker.backend import Backend
from loong.worker.batches.decode_lease import DecodeLeases
from loong.worker.batches.lease_slots import served_batch
from loong.worker.batches.lease_steps import LeaseSteps
from loong.worker.batches.step_sync import hear_step
from loong.worker.kv.pool import KVPool
from loong.worker.tracer import Span

_LARGE_STEP = 16_384  # rows

Serve: TypeAlias = Callable[[RunBatch, AbstractContextManager[Exchanging]], None]


class AttentionService:
    """Serves batches, each on a thread of its own, while this instance runs its own batches.

    A holder is a member without rows: it derives the queries from the plan, and answers them by the members'
    exchange. So leases whose steps are captured are served by captured steps, and all others by messages. It
    reads the KV that was there before the batch. This KV stays until the batch has ended: a member ends only
    when its last queries are answered, and the engine releases KV after that.
    """

    def __init__(
        self, instance_id: InstanceId, shard: Shard, pool: KVPool, fabric: Fabric, backend: Backend
    ) -> None:
        self._instance_id, self._pool, self._fabric = instance_id, pool, fabric
        self._own_device, self._device = backend.device, backend.service().device
        self._threads: dict[OwnerId, Thread] = {}  # the last that serves each of these
        self._last: dict[bool, Thread] = {}  # of those that are captured, and of the others
        self.leases: DecodeLeases | None = None  # of this instance, once their steps are captured
        self._no_queries = shard.zero_queries(0, self._device.torch_device)

    def warm_up(self) -> None:
        """Take memory for large steps, as threads that serve use it."""
        thread = Thread(target=self._warm_up, name="serve-warm-up", daemon=True)
        thread.start()
        thread.join()

    def begin(self, command: RunBatch) -> None:
        """Begin to serve a batch, before the next instruction of the engine is carried out.

        On devices captured leases are served one at a time, and so are all other batches. Instances get them
        in one order, so none waits for another in a circle.
        """
        serve, fabric, group = self._serve, self._fabric, command.plan.group.instance_ids
        is_captured = self.leases is not None and self.leases.can_run(command)
        if is_captured:
            serve, served = self._serve_captured, fabric.serve(command.batch_id, group, is_captured=True)
        else:
            served = fabric.serve(command.batch_id, group)
        self._allocate(command)
        before = None if fabric.arena is None else self._last.get(is_captured)
        name = f"serve-batch-{command.batch_id}"
        thread = Thread(target=_after, args=(before, serve, command, served), name=name, daemon=True)
        self._last[is_captured] = thread
        self._threads.update(dict.fromkeys(command.plan.request_ids, thread))
        thread.start()

    def wait_for(self, owner_id: OwnerId) -> None:
        """Return once a request is not served here: its slots are about to be released."""
        if (thread := self._threads.pop(owner_id, None)) is not None:
            thread.join()

    def answer(
        self, batch: BatchPlan, placements: Mapping[RequestId, Placement], members: Exchanging
    ) -> None:
        """Store the KV that is pushed in one step of a batch, and answer its queries, layer by layer."""
        step = AttentionStep(self._instance_id, batch, placements, self._pool)
        layout, pushes = query_layout(step, self._device), IncomingPushes(step, members, self._device)
        if layout.routing.is_empty and pushes.is_empty:
            return
        exchange = QueryExchange(members, self._device, layout.routing)
        for layer in range(self._pool.num_layers):
            pool, total = self._pool.layer(layer), Partial.unseen(self._no_queries, is_merged=True)
            if not pushes.is_empty:
                pushes.store(pool)
            query_attention(layout, pool, exchange, self._no_queries, total, self._device)
        if not pushes.is_empty:
            self._device.wait()
            pushes.confirm()

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""
        yield self, "answer", "served step"
        yield self, "_serve_captured", "served lease"

    def _serve(self, command: RunBatch, served: AbstractContextManager[Exchanging]) -> None:
        plan, live = command.plan, set(command.plan.request_ids)
        placements = {given.request_id: given.placement for given in command.inputs}
        self._device.use()
        # A peer that is lost or leaves ends the batch: its members report that. Its silence they may not see.
        ended = suppress(PeerLostError, AbandonedError)
        with ended, self._own_device.shared(), served as members, torch.inference_mode():
            for step in count():
                if plan.num_steps == 1:
                    self.answer(plan, placements, members)
                    break
                self.answer(plan.at_step(step, live), placements, members)
                if step + 1 >= hear_step(members, plan, live) or not live:
                    break
            self._device.wait()

    def _serve_captured(self, command: RunBatch, served: AbstractContextManager[Exchanging]) -> None:
        """Serve a lease whose members' steps are captured, by captured steps."""
        assert self.leases is not None, "they can run it"
        assert self.leases.graph.service is not None, "they can run it with holders"
        graph, live = self.leases.graph.service, set(command.plan.request_ids)
        steps = LeaseSteps.of(command, self.leases.graph.max_num_slots)
        graph.use()
        with self._own_device.shared():
            try:
                with suppress(PeerLostError, AbandonedError), served as members:
                    graph.begin(served_batch(command, self._instance_id))
                    graph.launch()
                    steps.lengthen()
                    while not steps.is_last:
                        graph.launch()
                        steps.end_before(hear_step(members, command.plan, live))
                        if not live:
                            break
                        steps.step += 1
                        steps.lengthen()
                    graph.wait()
            finally:
                graph.wait()  # steps that nobody answers any more end at once

    @torch.inference_mode()
    def _warm_up(self) -> None:
        self._device.use()
        kv, heads = self._pool.layer(0), self._no_queries.shape[1:].numel()
        row_bytes = heads * (4 * self._no_queries.itemsize + 4)  # queries, partials and messages
        copied_bytes = min(len(kv), MOST_COPIED) * kv[0].numel() * kv.itemsize
        self._device.keep_memory(_LARGE_STEP * row_bytes + copied_bytes)

    def _allocate(self, command: RunBatch) -> None:
        """Take slots for the KV that is pushed here."""
        for segment in command.plan.writes:
            if segment.instance_id == self._instance_id:
                self._pool.allocate(segment.owner_id, segment.positions)


def _after(
    before: Thread | None, serve: Serve, command: RunBatch, served: AbstractContextManager[Exchanging]
) -> None:
    if before is not None:
        before.join()
    serve(command, served)
