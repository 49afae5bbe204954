"""Steps of a model that are captured in lanes: chunks of a prompt, decodes, or both."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from one_gpu import PromptStep
from sm_lanes import Lane, LaneDevice, Replay, captured, empty_like_q
from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate
from loong.attention.pool import PoolAttention, pool_attention
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.load import load_model
from loong.model.shapes import find_config
from loong.model.tensor_parallel import SingleDevice
from loong.model.transformer import Decoder
from loong.worker.kv.pool import KVPool


class LaneModel:
    """A model with dummy weights, and a pool of random KV, for steps in any lane of one GPU."""

    def __init__(self, model: str, num_slots: int, device: Device) -> None:
        self.config = config = find_config(model, "dummy")
        self._decoder = load_model(model, "dummy", None, 0, SingleDevice(), device)
        self.pool = KVPool(config.kv_layout(), num_slots, device.torch_device)
        for layer in range(config.num_layers):
            self.pool.layer(layer).normal_()

    def captured(self, step: PromptStep, lane: Lane) -> Replay:
        """Return a replay of a step in a lane. Chunks have slots of their own, and so has each decode."""
        device = LaneDevice(self.pool.device.index, self.config.torch_dtype, lane)
        with torch.cuda.stream(lane.stream), device.capturing():
            return captured(self.call_of(step, device), lane)

    @torch.inference_mode()
    def call_of(self, step: PromptStep, device: Device) -> Callable[[], None]:
        """Return a function that takes the same step again and again, up to its likeliest tokens."""
        parts = list(_parts_of(step))
        writes = tuple(KVSegment(block.request_id, block.positions, 0) for block, _ in parts)
        plan = BatchPlan(ESPGroup((0,)), tuple(block for block, _ in parts), writes)
        for segment in writes:
            self.pool.release(segment.owner_id)  # its slots of another step
            self.pool.allocate(segment.owner_id, range(segment.positions.stop))
        its = AttentionStep(0, plan, {block.request_id: held for block, held in parts}, self.pool)
        pooled = pool_attention(its, ((block, rows.start) for block, rows in its.rows.items()), device)
        new_slots = device.upload(concatenate(its.slots(s.owner_id, [s.positions]) for s in writes))
        attention = _StepAttention(self.pool, device, pooled, new_slots)
        positions = concatenate(torch.arange(s.positions.start, s.positions.stop) for s in writes)
        last_rows = device.upload(torch.tensor([rows.stop - 1 for rows in its.rows.values()]))
        token_ids = device.upload(torch.randint(1000, positions.shape))
        positions = device.upload(positions)
        decoder = Decoder(self._decoder.shard, self._decoder.parameters, SingleDevice(), device)
        tokens = torch.zeros(len(parts), dtype=torch.int64, device=device.torch_device)

        @torch.inference_mode()
        def call() -> None:
            hidden = decoder.forward(token_ids, positions, positions + 1, attention)
            tokens.copy_(decoder.logits(hidden[last_rows]).argmax(-1))

        return call


def _parts_of(step: PromptStep) -> Iterator[tuple[QueryBlock, Placement]]:
    """Yield the queries of each request, and the KV before them."""
    if step.num_tokens:
        yield _part("prompt", step.num_cached, step.num_tokens)
    for number in range(step.num_decodes):
        yield _part(f"chat-{number}", step.context, 1)


def _part(request_id: str, num_cached: int, num_tokens: int) -> tuple[QueryBlock, Placement]:
    held = Placement((KVSegment(request_id, range(num_cached), 0),) if num_cached else ())
    return QueryBlock(request_id, range(num_cached, num_cached + num_tokens), 0, Transfer.QUERY), held


class _StepAttention:
    """Attention over the pool, as in workers; see `transformer.Attention`."""

    def __init__(self, pool: KVPool, device: Device, pooled: PoolAttention | None, new_slots: Tensor) -> None:
        if pooled is None:
            raise ValueError("the step has no queries")
        self._pool, self._device, self._pooled, self._new_slots = pool, device, pooled, new_slots

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor, _sinks: Tensor | None = None) -> Tensor:
        kv, singles = self._pool.layer(layer), self._pooled.singles
        if singles is not None and not self._pooled.tables:  # as in decode leases
            part = empty_like_q(q)
            self._device.attend_slots(q, kv, singles.lists, scale=q.shape[-1] ** -0.5, out=part)
            return part.out
        total = Partial.unseen(q, is_merged=self._pooled.is_merged)
        self._pooled.merge_into(total, q, kv, self._device)
        return total.out.to(q.dtype)
