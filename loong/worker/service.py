"""Attention over the KV of this instance for batches of groups in which it is no member."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Thread

import torch

from loong.attention.attention_step import AttentionStep
from loong.attention.pool import MOST_COPIED
from loong.attention.push import IncomingPushes
from loong.attention.remote import query_attention
from loong.attention.rotated import exchanges, rotated_exchanges
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId
from loong.fabric.errors import AbandonedError, PeerLostError
from loong.fabric.lanes import STEP_LANES, Lane
from loong.fabric.protocol import Exchanging, Fabric, OpenInLane
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.tensor_parallel import Shard
from loong.worker.backend import Backend
from loong.worker.batches.lease_slots import served_batch
from loong.worker.batches.lease_steps import LeaseSteps
from loong.worker.batches.step_sync import hear_step
from loong.worker.kv.pool import KVPool
from loong.worker.steps.serve_graph import ServeGraph
from loong.worker.steps.served_leases import ServedLeases
from loong.worker.tracer import Span

_MOST_ROWS = {Lane.SHORT_STEP: 255, Lane.LONG_STEP: 16_384}  # of queries, that memory is taken for


class AttentionService:
    """Serves batches, each on a thread of its own, while this instance runs its own batches.

    A holder is a member without rows: it derives the queries from the plan, and answers them by the members'
    exchange. So leases whose steps are captured are served by captured steps, and all others by messages. It
    reads the KV that was there before the batch. This KV stays until the batch has ended: a member ends only
    when its last queries are answered, and the engine releases KV after that.

    On devices there are lanes: several leases are served at a time, one short step and one long one. A
    batch waits for those before it with a common member, which are over there, and for those of its lane.
    Instances get batches in one order, so none waits for another in a circle.
    """

    def __init__(
        self, instance_id: InstanceId, shard: Shard, pool: KVPool, fabric: Fabric, backend: Backend
    ) -> None:
        self._instance_id, self._pool, self._fabric = instance_id, pool, fabric
        self._own_device, self._least_saved = backend.device, backend.least_saved
        self._devices = {lane: backend.service().device for lane in STEP_LANES}
        self._threads: dict[OwnerId, Thread] = {}  # the last that serves each of these
        self._last: dict[tuple[str, int], Thread] = {}  # of each member, and of each lane of steps
        self._leases: ServedLeases | None = None
        self._free_graphs: SimpleQueue[ServeGraph] = SimpleQueue()
        self._no_queries = shard.zero_queries(0, backend.device.torch_device)

    def warm_up(self, leases: ServedLeases | None) -> None:
        """Take memory for large steps, as threads that serve use it.

        `leases` are the captured steps of this instance, if there are any.
        """
        self._leases = leases
        for graph in () if leases is None else leases.services:
            self._free_graphs.put(graph)
        for lane in STEP_LANES:
            thread = Thread(target=self._warm_up, args=(lane,), name="serve-warm-up", daemon=True)
            thread.start()
            thread.join()

    def begin(self, command: RunBatch) -> None:
        """Begin to serve a batch, before the next instruction of the engine is carried out."""
        plan = command.plan
        opened = self._fabric.serve(command.batch_id, plan.group.instance_ids)
        self._allocate(command)
        keys = [("member", instance_id) for instance_id in plan.group.instance_ids]
        if self._leases is not None and self._leases.can_run(command):
            serve = partial(self._serve_captured, command, opened)
        else:
            lane = Lane.SHORT_STEP if _is_short(plan) else Lane.LONG_STEP
            serve = partial(self._serve, command, opened, lane)
            keys.append(("lane", lane))
        has_lanes = self._fabric.arena is not None
        before = {self._last[key] for key in keys if has_lanes and key in self._last}
        thread = Thread(
            target=_after, args=(before, serve), name=f"serve-batch-{command.batch_id}", daemon=True
        )
        self._last.update(dict.fromkeys(keys, thread))
        self._threads.update(dict.fromkeys(plan.request_ids, thread))
        thread.start()

    def wait_for(self, owner_id: OwnerId) -> None:
        """Return once a request is not served here: its slots are about to be released."""
        if (thread := self._threads.pop(owner_id, None)) is not None:
            thread.join()

    def answer(
        self,
        batch: BatchPlan,
        placements: Mapping[RequestId, Placement],
        members: Exchanging,
        device: Device,
    ) -> None:
        """Store the KV that is pushed in one step of a batch, and answer its queries, layer by layer.

        Those of its micro-batches come in turn.
        """
        step = AttentionStep(self._instance_id, batch, placements, self._pool, self._least_saved)
        exchanges_of = rotated_exchanges if batch.rotates else exchanges
        asked = [exchanges_of(part, members, device) for part in step.micro_batches()]
        pushes = IncomingPushes(step, members, device)
        if pushes.is_empty and all(its.routing.is_empty for each in asked for its, _ in each.values()):
            return
        for layer in range(self._pool.num_layers):
            pool, total = self._pool.layer(layer), Partial.unseen(self._no_queries, is_merged=True)
            window = self._pool.layout.window(layer)
            if not pushes.is_empty:
                pushes.store(pool, window)
            for number, each in enumerate(asked):
                asking_id = batch.group.instance_ids[(number + layer) % batch.group.dop]
                place = asking_id if batch.rotates else None
                layout, exchange = each[place, window]
                query_attention(layout, pool, exchange, self._no_queries, total, device)()
        if not pushes.is_empty:
            device.wait()
            pushes.confirm()

    def spans(self) -> Iterator[Span]:
        """Yield the spans of a trace: an object, its method and its name."""
        yield self, "answer", "served step"
        yield self, "_serve_captured", "served lease"

    def _serve(self, command: RunBatch, opened: OpenInLane, lane: Lane) -> None:
        """Serve steps that the host launches on all sides."""
        plan, live, device = command.plan, set(command.plan.request_ids), self._devices[lane]
        placements = {given.request_id: given.placement for given in command.inputs}
        device.use()
        # A peer that is lost or leaves ends the batch: its members report that. Its silence they may not see.
        ended = suppress(PeerLostError, AbandonedError)
        with ended, self._own_device.shared(), opened(lane) as members, torch.inference_mode():
            for step in count():
                if plan.num_steps == 1:
                    self.answer(plan, placements, members, device)
                    break
                self.answer(plan.at_step(step, live), placements, members, device)
                if step + 1 >= hear_step(members, plan, live) or not live:
                    break
            device.wait()

    def _serve_captured(self, command: RunBatch, opened: OpenInLane) -> None:
        """Serve a lease whose members' steps are captured, by captured steps."""
        graph = self._free_graphs.get()  # there is one soon: plans keep to their number
        try:
            self._serve_lease(command, opened, graph)
        finally:
            self._free_graphs.put(graph)

    def _serve_lease(self, command: RunBatch, opened: OpenInLane, graph: ServeGraph) -> None:
        live = set(command.plan.request_ids)
        steps = LeaseSteps.of(command, graph.max_num_slots, self._least_saved)
        graph.use()
        with self._own_device.shared():
            try:
                with suppress(PeerLostError, AbandonedError), opened(graph.lane) as members:
                    graph.begin(
                        served_batch(command, self._instance_id, self._pool.layout, self._least_saved)
                    )
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
    def _warm_up(self, lane: Lane) -> None:
        device = self._devices[lane]
        device.use()
        kv, heads = self._pool.layer(0), self._no_queries.shape[1:].numel()
        row_bytes = heads * (4 * self._no_queries.itemsize + 4)  # queries, partials and messages
        copied_bytes = min(len(kv), MOST_COPIED) * kv[0].numel() * kv.itemsize
        is_copied = lane is Lane.LONG_STEP  # few queries read KV where it is
        device.keep_memory(_MOST_ROWS[lane] * row_bytes + is_copied * copied_bytes)

    def _allocate(self, command: RunBatch) -> None:
        """Take slots for the KV that is pushed here."""
        for segment in command.plan.writes:
            if segment.instance_id == self._instance_id:
                self._pool.allocate(segment.owner_id, segment.positions)


def _is_short(plan: BatchPlan) -> bool:
    """Return whether a batch is one step of few queries, which are soon answered."""
    num_queries = sum(len(block.positions) for block in plan.queries)
    return plan.num_steps == 1 and not plan.pushes and num_queries <= _MOST_ROWS[Lane.SHORT_STEP]


def _after(before: Iterable[Thread], serve: Callable[[], None]) -> None:
    for thread in before:
        thread.join()
    serve()
